"""Formats in which models write tool calls, and how demanded calls are constrained.

tool_formats.toml has the table of formats, and tool_calls.py says how each format writes a
string."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Parts = Sequence[str]
"""A sequence of texts, regular expressions and markers. In a text, NAME is replaced by a name.
A regular expression begins with a slash. BEGIN and END are the markers of a section of calls."""
BEGIN, END = "BEGIN", "END"
START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
CONSTRAIN = "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", CALL, "<|return|>")
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, *MESSAGE_ENDS)
"""Special tokens of OpenAI's Harmony format, in which gpt-oss writes."""
THOUGHT = (f"{CHANNEL}analysis{MESSAGE}", "<|end|>")
"""The texts around a thought in Harmony, after the header."""
HEADER, ANSWER = f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
"""The beginning of a message of the model in Harmony, and the rest of the header of an answer."""


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls.

    Attributes:
        name: The name of the format.
        arguments: How arguments are written: "json", "tags", "gemma" or "python".
        begin: The text before a section of calls.
        end: The text after a section of calls, or "" if only the end of the answer ends it.
        inner: Special tokens within a section. In Gemma's formats, the first one is the quote.
        also: Further texts that begin a section.
        bare: Beginnings of a section without `begin`, at the start of an answer. They contain no
            white space; the model may write it anywhere.
        sign: Matches the chat templates of models with this format. "" for a format that no
            template distinguishes from another one.
        call: Matches the text before the arguments of a call, with the groups "name" and optionally
            "id". "" if the arguments are JSON that contains the name.
        call_end: The tag after the arguments, or "" if `end` is this tag.
        value: Matches the text before a value between tags, with the group "name".
        value_end: The tag after a value.
        lines: Whether templates put a line break before and after a value.
        before: The sequence before the arguments of a demanded call, or () if arguments are not
            JSON. Then demanded calls are free after `begin`.
        after: The sequence after the arguments of a demanded call.
        between: The sequence between two demanded calls.
        first: The beginning of a section of demanded calls.
        last: The end of a section of demanded calls.
        single: Whether a demanded call ends the output.
        without_inner: Fields with other values if the tokenizer lacks the tokens of `inner`.
    """

    name: str
    arguments: str
    begin: str
    end: str = ""
    inner: Sequence[str] = ()
    also: Sequence[str] = ()
    bare: Sequence[str] = ()
    sign: str = ""
    call: str = ""
    call_end: str = ""
    value: str = ""
    value_end: str = ""
    lines: bool = False
    before: Parts = ()
    after: Parts = ()
    between: Parts = ()
    first: Parts = ()
    last: Parts = ()
    single: bool = False
    without_inner: Mapping[str, Any] = field(default_factory=dict)


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TOOL_FORMATS = {name: ToolFormat(name, **entry) for name, entry in _ENTRIES.items()}
"""Formats by name."""
NOT_READ = frozenset(("kimi_k3",))
"""Parsers of mlx-lm for models that divide the complete answer into sections."""
OTHER_NAMES = {
    "glm45": "glm47",
    "hermes": "json_tools",
    "laguna": "glm47",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}
"""Names of further parsers of mlx-lm and vLLM -> the format that they parse."""


def format_in(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows, or None."""
    signs = ((name, entry.sign) for name, entry in TOOL_FORMATS.items())
    return next((name for name, sign in signs if sign and re.search(sign, chat_template)), None)


def parser_names() -> list[str]:
    """Return the names of formats, and further names. Harmony is left out, because models with
    another format cannot write it."""
    return sorted({*TOOL_FORMATS, *OTHER_NAMES} - {"harmony"})
