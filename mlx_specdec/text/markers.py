"""The markers that a model writes around thoughts and tool calls."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ..system import open_files_kept
from .thoughts import Thoughts
from .tokenizer import FileTokenizer, Tokenizer
from .tool_formats import (
    CHANNEL,
    HARMONY,
    MESSAGE,
    NOT_READ,
    OTHER_NAMES,
    START,
    THOUGHT,
    TOOL_FORMATS,
    ToolFormat,
    format_in,
    parser_names,
)

SEED_THOUGHT = ("<seed:think>", "</seed:think>")
"""The tokens before and after a thought in Seed-OSS models. mlx-lm does not recognize them."""


@dataclass(frozen=True)
class Marker:
    """A text that begins or ends a part of a completion, and its tokens."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Markers:
    """The markers of one model.

    Attributes:
        think: The markers before and after a thought, or () if the model marks none.
        calls: The format of tool calls, with the grammar that suits the tokenizer.
        special: The texts of the special tokens in markers, by their ids.
        channels: Whether completions are messages in Harmony's channels.
    """

    think: tuple[Marker, ...] = ()
    calls: ToolFormat | None = None
    special: Mapping[int, str] = field(default_factory=dict)
    channels: bool = False

    def without_calls(self) -> Self:
        """Return the markers for a request without tools."""
        if self.channels:
            return replace(self, calls=None)
        ids = {id for marker in self.think for id in marker.ids}
        special = {id: text for id, text in self.special.items() if id in ids}
        return replace(self, calls=None, special=special)

    def thoughts(self, prompt: Sequence[int], budget: int | None = None) -> Thoughts | None:
        """Return the thoughts at the end of a prompt, or None if the model marks none. budget: See
        `Thoughts`."""
        if not self.think:
            return None
        begin, end = (marker.ids for marker in self.think)
        return Thoughts(begin, end, _last(prompt, begin) > _last(prompt, end), budget)

    def in_header(self, prompt: Sequence[int]) -> bool:
        """Return whether the completion of a prompt begins within the header of a message."""
        ids = {text: id for id, text in self.special.items()}
        return self.channels and _last(prompt, [ids[START]]) > _last(prompt, [ids[MESSAGE]])

    def has_thought(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Return whether a prompt ends with a complete thought."""
        if not self.think:
            return False
        end = self.think[1].ids
        at = _last(prompt, end)
        return at >= 0 and not tokenizer.decode(prompt[at + len(end) :]).strip()


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
        known = {*parser_names(), *NOT_READ}
        names = (parser, format_in(template), label, by_vocabulary)
        name = next((OTHER_NAMES.get(name, name) for name in names if name in known), None)
    if name in NOT_READ:
        return NONE
    calls = TOOL_FORMATS.get(name or "")
    texts = [] if begin is None else [begin, end]
    think = tuple(Marker(text, ids(text)) for text in texts)
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
