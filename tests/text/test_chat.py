"""Chat templates without transformers: the same ids as with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import FileTokenizer, load_tokenizer

from ..support.tokenizers import byte_level

TOOL = {"type": "function", "function": {"name": "näme", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "keep", "arguments": {"text": "<a & 'b'>"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " hello \n"}],
    "system": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello <|end|>"},
        {"role": "assistant", "content": "a </think> deux  ", "reasoning_content": "so"},
    ],
    "tools": [
        {"role": "user", "content": [{"type": "text", "text": "oeufs"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "where?"},
        {"role": "tool", "content": '{"a": [1, 2.5, null]}', "name": "keep"},
        {"role": "user", "content": "find {it}"},
    ],
}
TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' +
m['content'] | string + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "</tools>" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning = message.reasoning_content %}
    {%- elif message.content is string and '</think>' in message.content %}
        {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').lstrip('\\n') %}
    {%- endif %}
    {{- message.role ~ loop.index0 ~ ns.last ~ reasoning.strip() ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}{{ call.function.arguments | tojson(indent=2, sort_keys=true) }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}""",
    "llama": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- date_string + system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '\\n\\n' + message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call!") }}{%- endif %}
        {{- message.tool_calls[0].function.arguments.items() | list | string }}
    {%- endif %}
{%- endfor %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | string + ' [/INST]' }}
{% else %}{{ message['content'] | string + eos_token }}{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'assistant') %}{% set role = 'model' %}
    {%- else %}{% set role = message['role'] %}{% endif %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | string | trim + '<end>\\n' }}
{%- endfor %}""",
    "generation": """{% set who = 'x' %}{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{% set who = 'y' %}{{ who }}{{ m.content }}
{%- endgeneration %}{% else %}{{ who }}{{ m.content }}{% endif %}{% endfor %}""",
    "loops": """{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% if m.role == 'system' %}{% continue %}{% endif %}<{{ m.content }}>
    {% endfor %}{{ dict(a=1, **{'b': 2}) | tojson(separators=(',', ':')) }}""",
    "oss": """{%- macro shown(value, depth=0) -%}{%- if value is mapping -%}
{%- for name, each in value.items() -%}{{ name }}={{ shown(each, depth + 1) }};{%- endfor -%}
{%- else -%}{{ value | tojson(ensure_ascii=true) }}{%- endif -%}{%- endmacro -%}
{%- for m in messages -%}{{ m.thinking }}{{ shown(m) }}{%- endfor -%}
{%- for tool in tools or [] -%}{{ shown(tool) }}{%- endfor -%}""",
    "filters": """{% set names = messages | map(attribute='role') | list %}
{{ names | join(', ') ~ 3 ** 4 ~ 7 % 4 ~ (1.5 * 2) ~ 'ab' * 2 ~ '%s %5.2f %%' % ('a', 1.25) }}
{{ '%(a)s' | format(a=names) }}{{ '{:>{}} {}'.format('b', 6, 20260101) }}{{ 'a'.rjust(3) }}
{{ 'x\ny' | indent(4) | center(20) }}{{ [1, 2, 3] | batch(2, 0) | list }}
{% for m in messages if m.role != 'system' and loop is undefined %}{{ loop.revindex }}
{%- endfor %}{{ {'a': (1, 2)} | tojson(indent=1) }}""",
    "whole": "{{ messages }}{{ documents is none }}{{ tools | length if tools else tools }}",
    "none": "{{ nothing.at.all }}",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_the_ids_that_transformers_gives(
    directory: Path, name: str, kind: str
) -> None:
    from transformers import AutoTokenizer

    tokens = {"bos_token": "<|start|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>"}}
    given: dict[str, Any] = {**tokens, "tokenizer_class": kind}
    byte_level(directory, chat_template=TEMPLATES[name], **given)
    own = load_tokenizer(directory, kind="decoder-only")
    theirs = AutoTokenizer.from_pretrained(directory)
    refused = 0
    for messages in CHATS.values():
        for ending in ("answer", "continue", "closed"):
            for settings in ({}, {"tools": [TOOL], "enable_thinking": False}):
                asked: dict[str, Any] = {
                    "add_generation_prompt": ending == "answer",
                    "continue_final_message": ending == "continue",
                }
                try:
                    expected = theirs.apply_chat_template(
                        messages, tokenize=True, return_dict=False, **asked, **settings
                    )
                except Exception:
                    refused += 1
                    with pytest.raises(CheckpointError, match="cannot be applied"):
                        own.apply_chat(messages, settings, ending=ending)
                else:
                    assert own.apply_chat(messages, settings, ending=ending) == expected
    assert "templated" not in vars(own)
    assert (refused == 18) == (name == "none")


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_template_in_chat_template_json_is_read(tmp_path: Path, kind: str) -> None:
    """The second class is one whose chats transformers encodes."""
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    byte_level(tmp_path, tokenizer_class=kind)
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"other": source}), encoding="utf-8")
    assert not load_tokenizer(tmp_path, kind="decoder-only").has_chat_template
    file.write_text(json.dumps({"chat_template": source}), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.apply_chat("midi")) == "[user] midi"
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.templated.chat_template == source
    # Any other file goes first.
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    assert tokenizer.decode(tokenizer.apply_chat("midi")) == "midi"
