"""Answers while they are generated: their choices, and how a wire format writes them."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.sequence import Emission, TokenLogprob
from ..engine.request import Request, Result
from ..text.vocabulary import token_bytes
from ..version import __version__
from .events import Event, Reader
from .problems import Problem

Payload = dict[str, Any]
FINGERPRINT = f"mlx-specdec-{__version__}"
LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""
token_pieces = functools.lru_cache(maxsize=1)(token_bytes)
"""Returns the bytes of each id of a Tokenizer; None for ids without a text."""


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request, read and checked.

    requests: one for each choice, prompt by prompt. prompt_tokens: of all prompts, each counted
    once. include_drafted: the chunks of a stream say whether drafts wrote them. echoed: the text
    before each choice, if echo is set. reader: makes the reader of a choice's text.
    """

    requests: Sequence[Request]
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    include_drafted: bool = False
    echoed: Sequence[str] = ()
    reader: Callable[[], Reader] = Reader


@dataclass
class Choice:
    """One text of an answer, as far as it was generated.

    finish_reason: as the engine calls it, "length" for a text that was cut; None while the text
    goes on. stop: the stop string that ended it. result: set when the engine has ended it.
    """

    reader: Reader = field(default_factory=Reader)
    texts: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    stop: str = ""
    result: Result | None = None

    def take(self, emission: Emission, result: Result | None) -> None:
        """Add what a step generated."""
        self.texts.append(emission.text)
        self.logprobs += emission.logprobs
        self.tokens += len(emission.tokens)
        self.stop = emission.stop
        self.result = result
        if result is not None:
            self.finish_reason = result.finish_reason

    def read(self, text: str | None) -> list[Event]:
        """Add and return the events of a further piece of the text; None is its end."""
        events = self.reader.read(text)
        self.events += events
        return events


class Writer(ABC):
    """Writes one answer in a wire format: as a whole, or as the payloads of a stream.

    done: the bytes that end a stream. named: the events of a stream are named after their type.
    """

    done = b""
    named = False

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        """Return the status and the payload of an error."""
        return problem.status, problem.as_dict()

    def failed(self, problem: Problem) -> list[Payload]:
        """Return the payloads that end a stream early."""
        return [self.error(problem)[1]]

    def silence(self) -> list[Payload]:
        """Return the payloads of a stream in which nothing was sent for a while; without any, a
        comment is sent."""
        return []

    @abstractmethod
    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        """Return the whole answer."""

    def start(self, index: int) -> list[Payload]:
        """Return the payloads before the first text of a choice."""
        return []

    @abstractmethod
    def piece(
        self, index: int, choice: Choice, emission: Emission, events: Sequence[Event]
    ) -> list[Payload]:
        """Return the payloads of what a step generated. events: those of its text."""

    @abstractmethod
    def end(self, index: int, choice: Choice) -> list[Payload]:
        """Return the payloads at the end of a choice."""

    def rest(self, choices: Sequence[Choice]) -> list[Payload]:
        """Return the payloads after all choices."""
        return []


def cached_tokens(choices: Sequence[Choice], prompt_tokens: int) -> int:
    """Return how many of the prompts' tokens the prompt cache had, each prompt counted once."""
    labels = [each.result.labels for each in choices if each.result is not None]
    read_by_choices = sum(each.prompt_tokens for each in labels)
    cached = sum(each.cached_tokens for each in labels)
    return cached * prompt_tokens // read_by_choices if read_by_choices else 0


def server_sent_event(payload: Payload, *, named: bool = False) -> bytes:
    """Serialize a payload of a stream. named: after its type."""
    name = f"event: {payload['type']}\n" if named else ""
    # In ASCII: clients that ask httpx for lines also end them at U+0085, U+2028 and U+2029.
    return f"{name}data: {json.dumps(payload)}\n\n".encode()
