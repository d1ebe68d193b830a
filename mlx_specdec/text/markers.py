"""The markers that a model writes around thoughts and tool calls, the formats of its calls, and how
demanded calls are constrained.

tool_formats.toml has the table of formats, and tool_calls.py says how each format writes a
string."""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ..system import open_files_kept
from .thoughts import Thoughts
from .tokenizer import FileTokenizer, Tokenizer

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


_ENTRIES = tomllib.loads(Path(__file__).with_name("tool_formats.toml").read_text("utf-8"))
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
PARSER_NAMES = sorted({*TOOL_FORMATS, *OTHER_NAMES} - {"harmony"})
"""Names of formats, and further names. Harmony is left out, because models with another format
cannot write it."""
SEED_THOUGHT = ("<seed:think>", "</seed:think>")
"""The tokens before and after a thought in Seed-OSS models. mlx-lm does not recognize them."""


@dataclass(frozen=True)
class Markers:
    """The markers of one model.

    Attributes:
        think: The ids of the markers before and after a thought, by their texts, or {} if the
            model marks none.
        calls: The format of tool calls, with the grammar that suits the tokenizer.
        special: The texts of the special tokens in markers, by their ids.
        channels: Whether completions are messages in Harmony's channels.
    """

    think: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    calls: ToolFormat | None = None
    special: Mapping[int, str] = field(default_factory=dict)
    channels: bool = False

    def without_calls(self) -> Self:
        """Return the markers for a request without tools."""
        if self.channels:
            return replace(self, calls=None)
        ids = {id for marker in self.think.values() for id in marker}
        special = {id: text for id, text in self.special.items() if id in ids}
        return replace(self, calls=None, special=special)

    def thoughts(self, prompt: Sequence[int], budget: int | None = None) -> Thoughts | None:
        """Return the thoughts at the end of a prompt, or None if the model marks none. budget: See
        `Thoughts`."""
        if not self.think:
            return None
        begin, end = self.think.values()
        return Thoughts(begin, end, _last(prompt, begin) > _last(prompt, end), budget)

    def in_header(self, prompt: Sequence[int]) -> bool:
        """Return whether the completion of a prompt begins within the header of a message."""
        ids = {text: id for id, text in self.special.items()}
        return self.channels and _last(prompt, [ids[START]]) > _last(prompt, [ids[MESSAGE]])

    def has_thought(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Return whether a prompt ends with a complete thought."""
        if not self.think:
            return False
        _, end = self.think.values()
        at = _last(prompt, end)
        return at >= 0 and not tokenizer.decode(prompt[at + len(end) :]).strip()


@functools.lru_cache(maxsize=4)
def markers_of(tokenizer: Tokenizer, parser: str = "") -> Markers:
    """Return the markers of a tokenizer's model, or none without a chat template. The first call
    takes up to seconds. parser: One of `PARSER_NAMES`, or "" for the format of tool calls that the
    chat template shows."""
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.has_chat_template:
        return Markers()
    templated = tokenizer.templated
    with open_files_kept():
        from mlx_lm import tokenizer_utils

    def ids(text: str) -> tuple[int, ...]:
        return tuple(templated.encode(text, add_special_tokens=False))

    pieces = tokenizer.ids
    template = str(templated.chat_template)
    channels = not parser and CHANNEL in template and pieces.keys() >= {*HARMONY}
    name: str | None = "harmony"
    if channels:
        begin, end = THOUGHT
    else:
        begin, end, *_ = tokenizer_utils._infer_thinking(templated)
        if begin is None and pieces.keys() >= {*SEED_THOUGHT}:
            begin, end = SEED_THOUGHT
        # Converters write a label that may contradict the template, from which the model learned.
        label = str(templated.init_kwargs.get("tool_parser_type"))
        by_vocabulary = tokenizer_utils._infer_tool_parser(templated)
        known = {*PARSER_NAMES, *NOT_READ}
        signs = ((name, format.sign) for name, format in TOOL_FORMATS.items() if format.sign)
        shown = next((name for name, sign in signs if re.search(sign, template)), None)
        names = (parser, shown, label, by_vocabulary)
        name = next((OTHER_NAMES.get(name, name) for name in names if name in known), None)
    if name in NOT_READ:
        return Markers()
    calls = TOOL_FORMATS.get(name or "")
    texts = [] if begin is None else [begin, end]
    think = {text: ids(text) for text in texts}
    if calls is not None:
        texts += [calls.begin, calls.end, *calls.inner]
        if pieces.keys().isdisjoint(calls.inner):
            calls = replace(calls, **calls.without_inner)
    found = {id for text in texts for id in ids(text)} & tokenizer.special_ids
    found |= {pieces[text] for text in HARMONY} if channels else set()
    special = {id: tokenizer.pieces[id] or "" for id in found}
    return Markers(think, calls, special, channels)


def _last(tokens: Sequence[int], part: Sequence[int]) -> int:
    """Return where the last occurrence of `part` begins in `tokens`, or -1 if there is none."""
    places = range(len(tokens) - len(part), -1, -1)
    return next((at for at in places if tuple(tokens[at : at + len(part)]) == tuple(part)), -1)
