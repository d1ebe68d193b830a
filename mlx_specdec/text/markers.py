"""The markers that a model writes around thoughts and tool calls."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..system import open_files_kept
from .thoughts import Thoughts
from .tokenizer import FileTokenizer, Tokenizer
from .tool_calls import ParsedCalls, parse_calls
from .tool_formats import (
    CHANNEL,
    HARMONY,
    MESSAGE,
    NOT_READ,
    OTHER_NAMES,
    START,
    TOOL_FORMATS,
    CallGrammar,
    ToolFormat,
    format_in,
    parser_names,
)

SEED_THOUGHT = ("<seed:think>", "</seed:think>")
"""Tokens around the thoughts of a Seed-OSS, which mlx-lm does not recognize."""


@dataclass(frozen=True)
class Marker:
    """A text that begins or ends a part of a completion, and its tokens."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class CallFormat:
    """The format of one model's tool calls.

    Attributes:
        name: The name of the format.
        format: The format's entry in the table.
        begin: The marker before a section of calls.
        end: The marker after a section of calls. Its text is empty if there is none.
        inner: Ids of the tokenizer's special tokens within a section, by their texts.
    """

    name: str
    format: ToolFormat
    begin: Marker
    end: Marker
    inner: Mapping[str, int] = field(default_factory=dict)

    @property
    def grammar(self) -> CallGrammar | None:
        """The grammar of demanded calls, or None if they are free after the begin marker."""
        without = self.format.grammar_without_inner
        return self.format.grammar if self.inner or without is None else without

    def read(self, text: str, tools: Sequence[Any]) -> ParsedCalls:
        """Read the calls in a section. text: The text after the begin marker, with the end marker
        if there is one."""
        return parse_calls(self.format, text, tools)


@dataclass(frozen=True)
class Channels:
    """The markers of a model whose completions are messages in Harmony's channels.

    Attributes:
        header: The beginning of a message of the model.
        message: The end of a header.
        answer: The rest of the header of an answer.
    """

    header: Marker
    message: Marker
    answer: Marker


@dataclass(frozen=True)
class Markers:
    """The markers of one model. special: The texts of the special tokens in markers, by their
    ids."""

    think_begin: Marker | None = None
    think_end: Marker | None = None
    calls: CallFormat | None = None
    special: Mapping[int, str] = field(default_factory=dict)
    channels: Channels | None = None

    def without_calls(self) -> Self:
        """Return the markers for a request without tools."""
        if self.channels is not None:
            return replace(self, calls=None)
        thoughts = (self.think_begin, self.think_end)
        ids = {id for marker in thoughts if marker is not None for id in marker.ids}
        special = {id: text for id, text in self.special.items() if id in ids}
        return replace(self, calls=None, special=special)

    def thinks_after(self, prompt: Sequence[int]) -> bool:
        if self.think_begin is None or self.think_end is None:
            return False
        return _last(prompt, self.think_begin.ids) > _last(prompt, self.think_end.ids)

    def thoughts(self, prompt: Sequence[int], budget: int | None) -> Thoughts | None:
        """Return the thoughts at the end of a prompt, or None if the model marks none. budget: See
        `Thoughts`."""
        if self.think_begin is None or self.think_end is None:
            return None
        marks = self.think_begin.ids, self.think_end.ids
        return Thoughts(*marks, self.thinks_after(prompt), budget)

    def in_header(self, prompt: Sequence[int]) -> bool:
        """Return whether the completion of a prompt begins within the header of a message."""
        if self.channels is None:
            return False
        return _last(prompt, self.channels.header.ids) > _last(prompt, self.channels.message.ids)

    def has_thought(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Return whether a prompt ends with a complete thought."""
        at = -1 if self.think_end is None else _last(prompt, self.think_end.ids)
        if self.think_end is None or at < 0:
            return False
        return not tokenizer.decode(prompt[at + len(self.think_end.ids) :]).strip()


NONE = Markers()


@functools.lru_cache(maxsize=4)
def markers_of(tokenizer: Tokenizer, parser: str = "") -> Markers:
    """Return the markers of a tokenizer's model, or NONE without a chat template. The first call
    takes up to seconds. parser: One of `parser_names`, or "" for the format of tool calls that the
    chat template shows."""
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.has_chat_template:
        return NONE
    templated = tokenizer.templated
    with open_files_kept():
        from mlx_lm import tokenizer_utils

    def marker(text: str) -> Marker:
        return Marker(text, tuple(templated.encode(text, add_special_tokens=False)))

    pieces = tokenizer.ids
    template = str(templated.chat_template)
    if not parser and CHANNEL in template and pieces.keys() >= {*HARMONY}:
        return _harmony(pieces, marker)
    begin, end, *_ = tokenizer_utils._infer_thinking(templated)
    if begin is None and pieces.keys() >= {*SEED_THOUGHT}:
        begin, end = SEED_THOUGHT
    # Converters write a label that may contradict the template, from which the model has learned.
    label = str(templated.init_kwargs.get("tool_parser_type"))
    by_vocabulary = tokenizer_utils._infer_tool_parser(templated)
    known = {*parser_names(), *NOT_READ}
    names = (parser, format_in(template), label, by_vocabulary)
    name = next((OTHER_NAMES.get(name, name) for name in names if name in known), None)
    calls = None if name is None or name in NOT_READ else _call_format(name, pieces, marker)
    thinks = begin is not None and name not in NOT_READ
    before, after = (marker(begin), marker(end)) if thinks else (None, None)
    parts = [before, after, *((calls.begin, calls.end) if calls else ())]
    ids = {id for part in parts if part is not None for id in part.ids}
    ids |= {*calls.inner.values()} if calls else set()
    special = {id: tokenizer.pieces()[id] or "" for id in ids & tokenizer.special_ids}
    return Markers(before, after, calls, special)


def _harmony(pieces: Mapping[str, int], marker: Callable[[str], Marker]) -> Markers:
    return Markers(
        marker(f"{CHANNEL}analysis{MESSAGE}"),
        marker("<|end|>"),
        _call_format("harmony", pieces, marker),
        {pieces[text]: text for text in HARMONY},
        Channels(marker(f"{START}assistant"), marker(MESSAGE), marker(f"{CHANNEL}final{MESSAGE}")),
    )


def _call_format(
    name: str, pieces: Mapping[str, int], marker: Callable[[str], Marker]
) -> CallFormat:
    found = TOOL_FORMATS[name]
    inner = {text: pieces[text] for text in found.inner if text in pieces}
    return CallFormat(name, found, marker(found.begin), marker(found.end), inner)


def _last(tokens: Sequence[int], part: Sequence[int]) -> int:
    """Return the last index of `part` in `tokens`, or -1."""
    places = range(len(tokens) - len(part), -1, -1)
    return next((at for at in places if tuple(tokens[at : at + len(part)]) == tuple(part)), -1)
