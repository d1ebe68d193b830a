"""What Anthropic's clients hear: messages of blocks, and their events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from ..decoding.stop_criteria import Emission
from ..text.markers import NONE
from . import messages
from .asked import Asked
from .events import Arguments, Call, Event, Text, calls_of
from .figures import cached_tokens
from .problems import Problem
from .reading import Reader
from .wire import Choice, Told

REASONS = {"eos": "end_turn", "stop": "stop_sequence"}


class MessagesWire:
    """As wire.Wire, for a single choice. model: its name."""

    done = b""
    named = True

    def __init__(self, model: str, asked: Asked) -> None:
        self._model = model
        self._input = asked.prompt_tokens
        self._reader = Reader(NONE) if asked.reader is None else asked.reader()
        self._block = -1
        self._open: object = None

    def answer(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        """The whole answer at once."""
        [choice] = choices
        events = self._reader.push("".join(choice.texts)) + self._reader.finish()
        told = {**self._message(_content(events), choice.tokens), **self._end(choice)}
        return {**told, "usage": self._usage(choice)}

    def slow(self, index: int) -> bool:
        """Whether a call is being read."""
        return self._reader.inside

    def first(self, index: int) -> list[Told]:
        """What comes before the first text."""
        return [{"type": "message_start", "message": self._message([], 0)}]

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """Events of what a step gave, if there is some."""
        return self._events(self._reader.push(emission.text))

    def end(self, index: int, choice: Choice) -> list[Told]:
        """What comes after the last text, and what was held back before it."""
        told = self._events(self._reader.finish())
        if self._block < 0:
            told += self._begin(dict(EMPTY), "content")
        return [
            *told,
            *self._close(),
            {"type": "message_delta", "delta": self._end(choice), "usage": self._usage(choice)},
            {"type": "message_stop"},
        ]

    def rest(self, choices: Sequence[Choice], asked: Asked) -> list[Told]:
        """Nothing comes after the end."""
        return []

    def error(self, problem: Problem) -> Told:
        """What ends a stream early."""
        return messages.error(problem)

    def _events(self, events: Sequence[Event]) -> list[Told]:
        return [told for event in events for told in self._event(event)]

    def _event(self, event: Event) -> list[Told]:
        """What is read, in a block of its own kind."""
        if isinstance(event, Call):
            return self._begin(_tool_use(event, {}), event.index)
        if isinstance(event, Arguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        block, delta = BLOCKS[event.kind]
        begun = [] if self._open == event.kind else self._begin(dict(block), event.kind)
        kind, name = delta
        return [*begun, self._delta({"type": kind, name: event.text})]

    def _begin(self, block: Told, kind: object) -> list[Told]:
        closed = self._close()
        self._block, self._open = self._block + 1, kind
        begun = {"type": "content_block_start", "index": self._block, "content_block": block}
        return [*closed, begun]

    def _close(self) -> list[Told]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._block}]

    def _delta(self, delta: Told) -> Told:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, content: list[Told], tokens: int) -> Told:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._counts(0, tokens),
        }

    def _usage(self, choice: Choice) -> Told:
        """Tokens as Anthropic counts them: what was not read again is no input."""
        return self._counts(cached_tokens([choice], self._input), choice.tokens)

    def _counts(self, cached: int, tokens: int) -> Told:
        return {
            "input_tokens": self._input - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
            **UNUSED,
        }

    def _end(self, choice: Choice) -> Told:
        reason = choice.result.finish_reason if choice.result is not None else "length"
        told = REASONS.get(reason, "max_tokens")
        if told == "end_turn" and self._reader.called:
            told = "tool_use"
        return {"stop_reason": told, "stop_sequence": choice.stop or None}


UNUSED: Told = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
"""Fields of a usage that Anthropic's schema requires and that mean nothing here."""
EMPTY: Told = {"type": "text", "text": "", "citations": None}
BLOCKS = {
    "content": (EMPTY, ("text_delta", "text")),
    "reasoning": (
        {"type": "thinking", "thinking": "", "signature": ""},
        ("thinking_delta", "thinking"),
    ),
}
"""How a block of each kind begins, and what its deltas are called."""


def _content(events: Sequence[Event]) -> list[Told]:
    """Blocks of all that was read, in its order, which is that of a stream."""
    blocks: list[Told] = []
    arguments = {call.index: text for call, text in calls_of(events)}
    for event in events:
        if isinstance(event, Call):
            blocks.append(_tool_use(event, _object(arguments[event.index])))
        elif isinstance(event, Text):
            block, (_, name) = BLOCKS[event.kind]
            if not blocks or blocks[-1]["type"] != block["type"]:
                blocks.append(dict(block))
            blocks[-1][name] += event.text
    return blocks or [dict(EMPTY)]


def _tool_use(call: Call, given: object) -> Told:
    told = {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
    return {**told, "caller": {"type": "direct"}}


def _object(arguments: str) -> object:
    """Arguments as an object; those that were cut are none yet."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
