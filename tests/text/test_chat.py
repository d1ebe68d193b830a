"""Chat templates: what they read, how a prompt ends, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.chat import Ending
from mlx_specdec.text.tokenizer import DirectoryTokenizer, load_tokenizer

from ..support.tokenizers import byte_level

TOOL = {"type": "function", "function": {"name": "näme", "parameters": {"type": "object"}}}
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a <deux>"}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ mood }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def templated(directory: Path, template: str) -> DirectoryTokenizer:
    tokens = {"bos_token": "<|start|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    byte_level(directory, chat_template=template, **tokens)
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    assert isinstance(tokenizer, DirectoryTokenizer)
    return tokenizer


@pytest.mark.parametrize(
    ("ending", "end"), [("answer", ";[assistant]"), ("closed", ";"), ("continue", "")]
)
def test_a_prompt_ends_as_its_reader_expects(tmp_path: Path, ending: Ending, end: str) -> None:
    tokenizer = templated(tmp_path, TEMPLATE)
    ids = tokenizer.apply_chat(TALK, ending=ending)
    text = f"<|start|>[user] hello;[assistant] a <deux>{end}"
    assert ids == tokenizer.templated.encode(text, add_special_tokens=False)


def test_a_template_reads_tools_variables_and_thoughts(tmp_path: Path) -> None:
    tokenizer = templated(tmp_path, f"{TEMPLATE}{{{{ messages[0].thinking }}}}")
    thought = [{"role": "user", "content": None, "reasoning_content": "where?"}]
    text = tokenizer.decode(tokenizer.apply_chat(thought, {"tools": [TOOL], "mood": "so"}))
    assert text == f"[user] ;{json.dumps(TOOL, ensure_ascii=False)}so[assistant]where?"


@pytest.mark.parametrize(
    "template", ["{{ nothing.at.all }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception(1) }}"]
)
def test_a_template_that_fails_is_one_line(tmp_path: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be applied .*--no-chat-template") as caught:
        templated(tmp_path, template).apply_chat("hello")
    assert "\n" not in str(caught.value)


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
    assert isinstance(tokenizer, DirectoryTokenizer)
    assert tokenizer.templated.chat_template == source
    # Any other file goes first.
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    assert tokenizer.decode(tokenizer.apply_chat("midi")) == "midi"
