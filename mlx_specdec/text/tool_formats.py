"""Formats of tool calls that mlx-lm has no parser for, under the names of vLLM's parsers."""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Parse = Callable[[str, Any], Any]
BETWEEN = re.compile(r"[\s,;\]]*")
"""Characters that separate or follow calls in JSON."""


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls.

    begin, end: The texts around a section of calls. An empty `end` is the end of the answer.
    parse: Turns the text between `begin` and `end`, and the tools, into a list of calls, each with
        "name" and "arguments". Raises an exception for a text that is no call.
    inner: Special tokens within a section.
    also: Further texts that begin a section.
    bare: How a section begins without `begin`, at the start of an answer. White space is left out
        of these texts, and may stand anywhere in the model's.
    """

    begin: str
    end: str
    parse: Parse
    inner: Sequence[str] = ()
    also: Sequence[str] = ()
    bare: Sequence[str] = ()


def json_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    """Return the calls in a JSON list, or in JSON objects that follow each other. Raises
    ValueError."""
    found, place, decoder = [], 0, json.JSONDecoder()
    text = text.strip()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        found += value if isinstance(value, list) else [value]
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    return [_call(value) for value in found]


def _call(value: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call that was JSON. Raises ValueError."""
    called = value if isinstance(value, dict) else {}
    name, arguments = called.get("name"), called.get("arguments", called.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"no call: {value!r:.80}")
    return {"name": name, "arguments": arguments}


def _tagged_calls(text: str, tools: Any) -> Any:
    """Return the call between tags, which Seed-OSS writes as Qwen3-Coder does."""
    return importlib.import_module("mlx_lm.tool_parsers.qwen3_coder").parse_tool_call(text, tools)


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_INNER = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(*DEEPSEEK, json_calls, DEEPSEEK_INNER),
    "deepseek_v31": ToolFormat(*DEEPSEEK, json_calls, DEEPSEEK_INNER),
    "granite": ToolFormat("<|tool_call|>", "", json_calls, also=("<tool_call>",)),
    "llama3_json": ToolFormat(
        "<|python_tag|>", "", json_calls, bare=('{"name":"', '{"type":"function","name":"')
    ),
    "phi4_mini_json": ToolFormat(
        "<|tool_call|>", "<|/tool_call|>", json_calls, also=("functools[",)
    ),
    "seed_oss": ToolFormat("<seed:tool_call>", "</seed:tool_call>", _tagged_calls),
}
"""By name. Sources: the models' chat templates, and the parsers of vLLM."""
SIGNS = {
    "deepseek_v3": re.compile(f"{DEEPSEEK[0]}(?s:.)*```json"),
    "deepseek_v31": re.compile(DEEPSEEK[0]),
    "llama3_json": re.compile('"parameters": dictionary of argument name'),
    "phi4_mini_json": re.compile(r"<\|/tool(?:_call)?\|>|functools\["),
    "granite": re.compile(r"<\|tool_call\|>"),
    "seed_oss": re.compile("<seed:tool_call>"),
}
"""Expressions that match the chat templates of models with this format. The first match counts:
DeepSeek V3 puts arguments into a code block, unlike V3.1, and Phi-4 ends a section, unlike
Granite."""


def format_in(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows, None without one."""
    return next((name for name, sign in SIGNS.items() if sign.search(chat_template)), None)
