"""Chat templates that write tool calls as the published templates of each format do: they do the
same with names and values, and are otherwise as short as possible."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, Template

JSON = "{{ v | tojson if v is not string else v }}"
ITEMS = "{% for k, v in call.arguments.items() %}"
QWEN = (
    "{% for tool_call in calls %}{% set call = tool_call %}"
    "{{ '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
    "{% for k, v in call.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}VALUE"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
GLM = (
    "{% for call in calls %}{{ '\\n<tool_call>' + call.name + '\\n' }}"
    + ITEMS
    + "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    + JSON
    + "{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
)
INVOKE = (
    "{{ 'BEGIN\\n' }}{% for call in calls %}{{ '<invoke name=\"' + call.name + '\">\\n' }}"
    + ITEMS
    + "{{ '<parameter name=\"' + k + '\">' }}"
    + JSON
    + "{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}{{ 'END' }}"
)
GEMMA = (
    "{% macro write(v) %}{% if v is string %}{{ 'QUOTE' + v + 'QUOTE' }}"
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}"
    "{{ ',' if not loop.first }}{{ k + ':' }}{{ write(w) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}{{ '[' }}{% for w in v %}{{ ',' if not loop.first }}"
    "{{ write(w) }}{% endfor %}{{ ']' }}{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% for call in calls %}{{ 'BEGINcall:' + call.name }}{{ write(call.arguments) }}{{ 'END' }}"
    "{% endfor %}"
)
LISTED = (
    "{{ 'BEGIN[' }}{% for tool_call in calls %}{{ ', ' if not loop.first }}"
    '{{ \'{"name": "\' + tool_call.name + \'", "arguments": \' }}{{ tool_call.arguments | tojson }}'
    "{{ '}' }}{% endfor %}{{ ']END' }}"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
DEEPSEEK_END = "<｜tool▁calls▁end｜>"


def _between(template: str, begin: str, end: str, quote: str = "") -> str:
    return template.replace("BEGIN", begin).replace("END", end).replace("QUOTE", quote)


def _deepseek(before: str, after: str) -> str:
    begin, call, separator, end = DEEPSEEK
    return (
        f"{{{{ '{begin}' }}}}{{% for call in calls %}}{{{{ '{call}{before}' }}}}"
        f"{{{{ call.name + '{separator if not before else ''}{after}' }}}}"
        "{{ call.arguments | tojson }}"
        f"{{{{ '{after and chr(92) + 'n```'}{end}' }}}}{{% endfor %}}{{{{ '{DEEPSEEK_END}' }}}}"
    )


PYTHONIC = (
    "{{ '<|tool_call_start|>[' }}{% for call in calls %}{{ ', ' if not loop.first }}"
    "{{ call.name + '(' }}{% for k, v in call.arguments.items() %}{{ ', ' if not loop.first }}"
    "{{ k + '=' }}{% if v is string %}"
    "{{ \"'\" + (v | replace('\\\\', '\\\\\\\\') | replace(\"'\", \"\\\\'\")"
    " | replace('\\n', '\\\\n') | replace('\\r', '\\\\r')) + \"'\" }}"
    "{% elif v is iterable %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endfor %}{{ ')' }}"
    "{% endfor %}{{ ']<|tool_call_end|>' }}"
)
TEMPLATES = {
    "json_tools": '{% for tool_call in calls %}{{ \'<tool_call>\\n{"name": "\' + tool_call.name }}'
    "{{ '\", \"arguments\": ' }}{{ tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}",
    "llama3_json": "{% for call in calls %}{{ '{\"name\": \"' + call.name + '\", ' }}"
    "{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}{% endfor %}",
    "mistral": "{% for call in calls %}{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}"
    "{{ call.arguments | tojson }}{% endfor %}",
    "mistral's lists": _between(LISTED, "[TOOL_CALLS] ", ""),
    "mistral's ids": "{% for call in calls %}{{ '[TOOL_CALLS]' + call.name }}"
    "{{ '[CALL_ID]a1B2c3D4e[ARGS]' }}{{ call.arguments | tojson }}{% endfor %}",
    "granite": _between(LISTED, "<|tool_call|>", ""),
    "phi4_mini_json": _between(LISTED, "<|tool_call|>", "<|/tool_call|>"),
    "deepseek_v3": _deepseek("function" + DEEPSEEK[2], "\\n```json\\n"),
    "deepseek_v31": _deepseek("", ""),
    "kimi_k2": "{{ '<|tool_calls_section_begin|>' }}{% for call in calls %}"
    "{{ '<|tool_call_begin|>functions.' + call.name + ':' }}{{ loop.index0 }}"
    "{{ '<|tool_call_argument_begin|>' }}{{ call.arguments | tojson }}{{ '<|tool_call_end|>' }}"
    "{% endfor %}{{ '<|tool_calls_section_end|>' }}",
    "qwen3_coder": QWEN.replace("VALUE", JSON),
    # The first template of Qwen3-Coder writes numbers and truth values as Python does.
    "qwen3_coder's first": QWEN.replace(
        "VALUE",
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}",
    ),
    "seed_oss": QWEN.replace("tool_call>", "seed:tool_call>")
    .replace(">\\n' }}VALUE", ">' }}VALUE")
    # It has no line breaks around values.
    .replace("VALUE{{ '\\n</", JSON + "{{ '</"),
    "glm47": GLM,
    "glm47's line": GLM.replace(">\\n<", "><").replace("\\n", ""),
    "laguna": GLM,
    "longcat": GLM.replace("tool_call>", "longcat_tool_call>").replace("arg_", "longcat_arg_"),
    "minimax_m2": _between(INVOKE, "<minimax:tool_call>", "</minimax:tool_call>"),
    "muse_spark": _between(
        INVOKE.replace("<invoke", "<atem:invoke")
        .replace("</invoke", "</atem:invoke")
        .replace("parameter", "atem:parameter"),
        "<atem:function_calls>",
        "</atem:function_calls>",
    ),
    "minicpm5": "{% for call in calls %}{{ '<function name=\"' + call.name + '\">' }}"
    + ITEMS
    + "{% set text = v if v is string else v | tojson %}{{ '<param name=\"' + k + '\">' }}"
    "{% if '<' in text or '&' in text or '\\n' in text %}{{ '<![CDATA[' + text + ']]>' }}"
    "{% else %}{{ text }}{% endif %}{{ '</param>' }}{% endfor %}{{ '</function>' }}{% endfor %}",
    "gemma4": _between(GEMMA, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": _between(GEMMA, "<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": PYTHONIC,
    # The first template of LFM2.5 puts quotes around strings as they are.
    "pythonic's quotes": PYTHONIC.replace(
        PYTHONIC[PYTHONIC.index('{{ "\'"') : PYTHONIC.index("{% elif v is iterable")],
        "{{ '\"' + v + '\"' }}",
    ),
}
"""Templates of a message's calls, a list with names and arguments. After an apostrophe, the name of
a format is followed by the name of a variety."""


def written(template: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return what the template of this name writes for calls."""
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _compiled(TEMPLATES[template]).render(calls=listed)


@functools.cache
def _compiled(source: str) -> Template:
    # As transformers compiles templates.
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source)
