"""Answers while they are generated: their choices, and how a wire format writes them."""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.sequence import Emission, TokenLogprob
from ..engine.request import Part, Result
from ..text.vocabulary import token_bytes
from ..version import __version__
from .bodies import Body
from .events import Event, Reader
from .problems import Problem
from .requests import ParsedRequest, RequestParser

Payload = dict[str, Any]
FINGERPRINT = f"mlx-specdec-{__version__}"
LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""
NOTHING = Emission((), ())
token_pieces = functools.lru_cache(maxsize=1)(token_bytes)
"""Returns the bytes of each id of a Tokenizer; None for ids without a text."""


@dataclass
class Choice:
    """One text of an answer, as far as it was generated.

    index: its place among the choices. drafted, accepted: numbers of draft tokens. finish_reason:
    as the engine calls it, "length" for a text that was cut; None while the text goes on. stop: the
    stop string that ended it. result: set when the engine has ended it."""

    index: int = 0
    reader: Reader = field(default_factory=Reader)
    texts: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    stop: str = ""
    result: Result | None = None

    def take(self, part: Part) -> None:
        """Add what a step generated."""
        emission = part.emission
        self.texts.append(emission.text)
        self.logprobs += emission.logprobs
        self.tokens += len(emission.tokens)
        self.drafted += part.drafted
        self.accepted += part.accepted
        self.stop = emission.stop
        self.result = part.result
        if part.result is not None:
            self.finish_reason = part.result.finish_reason

    def read(self, text: str | None) -> list[Event]:
        """Add and return the events of a further piece of the text; None is its end."""
        events = self.reader.read(text)
        self.events += events
        return events


class Writer(ABC):
    """Reads a checked body and writes the answer to it: as a whole, or as the payloads of a stream.

    done: the bytes that end a stream. named: the events of a stream are named after their type.
    include_drafted: the payloads of a stream say whether drafts wrote them. Raises Problem."""

    done = b""
    named = False
    include_drafted = False

    def __init__(self, parser: RequestParser, body: Body) -> None:
        self.parser, self.body = parser, body
        self.stream = body.get("stream", False)
        self.request = self.parse(body)

    @abstractmethod
    def parse(self, body: Body) -> ParsedRequest:
        """Return what has to be generated. Raises Problem."""

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        """Return the status and the payload of an error."""
        return problem.status, problem.as_dict()

    def failed(self, problem: Problem) -> list[Payload]:
        """Return the payloads that end a stream early."""
        return [self.error(problem)[1]]

    def silence(self) -> list[Payload]:
        """Return the payloads of a stream that is silent; without any, a comment is sent."""
        return []

    @abstractmethod
    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        """Return the whole answer."""

    def start(self, choice: Choice) -> list[Payload]:
        """Return the payloads before the first text of a choice."""
        return []

    def piece(self, choice: Choice, emission: Emission, events: Iterable[Event]) -> list[Payload]:
        """Return the payloads of what a step generated. events: those of its text."""
        return [payload for event in events for payload in self.event(event)]

    def event(self, event: Event) -> list[Payload]:
        """Return the payloads of an event."""
        raise NotImplementedError

    @abstractmethod
    def end(self, choice: Choice) -> list[Payload]:
        """Return the payloads at the end of a choice."""

    def rest(self, choices: Sequence[Choice]) -> list[Payload]:
        """Return the payloads after all choices."""
        return []

    def cached_tokens(self, choices: Sequence[Choice]) -> int:
        """Return how many of the prompts' tokens the prompt cache had, each prompt counted once."""
        labels = [choice.result.labels for choice in choices if choice.result is not None]
        read_by_choices = sum(label.prompt_tokens for label in labels)
        cached = sum(label.cached_tokens for label in labels)
        return cached * self.request.prompt_tokens // max(1, read_by_choices)


def server_sent_event(payload: Payload, *, named: bool = False) -> bytes:
    """Serialize a payload of a stream. named: after its type."""
    name = f"event: {payload['type']}\n" if named else ""
    # In ASCII: clients that ask httpx for lines also end them at U+0085, U+2028 and U+2029.
    return f"{name}data: {json.dumps(payload)}\n\n".encode()
