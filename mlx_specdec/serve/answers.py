"""Answers while they are generated: their choices, and how a wire format writes them."""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..results import Result, Step, TokenLogprob
from ..text.thoughts import Thoughts
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import token_bytes
from ..version import __version__
from .events import Event, Reader
from .problems import Problem
from .requests import CompletionBody, LoadedModel

Payload = dict[str, Any]
FINGERPRINT = f"mlx-specdec-{__version__}"
LEAST_LOGPROB = -9999.0
"""The logprob that is sent in place of minus infinity, which JSON lacks."""
token_pieces = functools.lru_cache(maxsize=1)(token_bytes)
"""Returns the bytes of each id of a Tokenizer, or None for ids without a text."""


def token_piece(tokenizer: Tokenizer, id: int) -> bytes | None:
    """Return the bytes of a token's text, or None for an id without a text."""
    pieces = token_pieces(tokenizer)
    return pieces[id] if id < len(pieces) else None


@dataclass
class Choice:
    """One completion of an answer, as far as it was generated.

    Attributes:
        drafted: Number of draft tokens.
        finish_reason: The engine's reason, or None before the end. It is "length" for a completion
            that was cut because of the time limit.
        stop: The stop string that ended the completion, or "".
        result: The engine's result, or None before the end and for a completion that was cut.
        thoughts: The thoughts so far, or None if the model marks none.
        logprobs: The log-probabilities of its tokens, if they are requested. Those of all prompt
            tokens but the first come before them, if they are requested, too.
    """

    index: int = 0
    reader: Reader = field(default_factory=Reader)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    stop: str = ""
    result: Result | None = None
    thoughts: Thoughts | None = None

    @property
    def complete(self) -> bool:
        """Whether the model or a stop string ended the completion, and not a limit."""
        return self.finish_reason in ("eos", "stop")

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of thoughts, without the marks around them."""
        return 0 if self.thoughts is None else self.thoughts.tokens

    def take(self, step: Step) -> None:
        """Add what a step generated."""
        self.logprobs += [*step.prompt_logprobs, *step.logprobs]
        self.tokens += len(step.tokens)
        if self.thoughts is not None:
            ended = step.finish_reason == "eos"
            self.thoughts = self.thoughts.after(step.tokens[: -1 if ended else None])
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.stop = step.stop
        self.result = step.result
        self.finish_reason = step.finish_reason

    def read(self, text: str | None) -> list[Event]:
        """Add and return the events of the next piece of text. None is the end of the text."""
        events = self.reader.read(text)
        self.events += events
        return events


class Writer(ABC):
    """The wire format of one answer: it writes a complete answer, the payloads of a stream, or an
    error.

    Attributes:
        model: The name of the model for clients.
        prepared: The request to the engine.
        body: The body of the request.
        stream: Whether the answer is a stream.
        tokenizer: The tokenizer of the model.
        done: Bytes that end a stream.
        media: The media type of a stream.
        heartbeat: Bytes that keep proxies from closing a silent stream.
        named: Whether the events of a stream are named after their type.
        include_drafted: Whether payloads of a stream say if their text was drafted.
    """

    done = b""
    media = "text/event-stream"
    heartbeat = b": keep-alive\n\n"
    named = False
    include_drafted = False

    def __init__(self, model: LoadedModel, body: CompletionBody) -> None:
        self.model, self.prepared, self.body = model.name, body.prepared(model), body
        self.stream, self.tokenizer = body.stream, model.pair.tokenizer

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        """Return the HTTP status and the body with which the writer's API reports an error. This is
        OpenAI's form."""
        return problem.status, problem.as_dict()

    def failed(self, problem: Problem) -> Iterable[Payload]:
        """Return the payloads that end a stream early."""
        return [self.error(problem)[1]]

    def encoded(self, payload: Payload) -> bytes:
        """Return the bytes of a payload of a stream."""
        name = f"event: {payload['type']}\n" if self.named else ""
        # JSON is written in ASCII, because httpx ends lines at U+0085, U+2028 and U+2029 too.
        return f"{name}data: {json.dumps(payload)}\n\n".encode()

    def silence(self) -> Iterable[Payload]:
        """Return the payloads for a silent stream. If there are none, the heartbeat is sent."""
        return ()

    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        """Return the complete answer: by default, the end of a stream that has all events."""
        [choice] = choices
        return self.last(choice, choice.events)

    def start(self, choice: Choice) -> Iterable[Payload]:
        """Return the payloads before the first text of a choice."""
        return ()

    @abstractmethod
    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterable[Payload]:
        """Return the payloads of one step. events: The events in the step's text."""

    def end(self, choice: Choice) -> Iterable[Payload]:
        """Return the payloads at the end of a choice."""
        return [self.last(choice, ())]

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        """Return the payload that ends a choice. events: The events that it contains."""
        raise NotImplementedError

    def rest(self, choices: Sequence[Choice]) -> Iterable[Payload]:
        """Return the payloads after all choices."""
        return ()

    def cached_tokens(self, choices: Sequence[Choice]) -> int:
        """Return the number of cached prompt tokens, counting each prompt once."""
        labels = [choice.result.labels for choice in choices if choice.result is not None]
        prompt_tokens = sum(label.prompt_tokens for label in labels)
        cached_tokens = sum(label.cached_tokens for label in labels)
        return cached_tokens * self.prepared.prompt_tokens // max(1, prompt_tokens)

    @staticmethod
    def timings(choices: Sequence[Choice]) -> dict[str, Payload]:
        """Return llama.cpp's figures of times and drafts, or {} if every choice was cut."""
        results = [choice.result for choice in choices if choice.result is not None]
        if not results:
            return {}
        prompt_ms = 1000 * max(result.stats.seconds.prompt for result in results)
        predicted_ms = 1000 * max(result.stats.seconds.decoding for result in results)
        cache_n = sum(result.labels.cached_tokens for result in results)
        prompt_n = sum(result.labels.prompt_tokens for result in results) - cache_n
        predicted_n = sum(len(result.tokens) for result in results)
        figures: Payload = {"cache_n": cache_n}
        parts = {"prompt": (prompt_n, prompt_ms), "predicted": (predicted_n, predicted_ms)}
        for name, (n, ms) in parts.items():
            figures[f"{name}_n"], figures[f"{name}_ms"] = n, round(ms, 3)
            figures[f"{name}_per_token_ms"] = _ratio(ms, n)
            figures[f"{name}_per_second"] = _ratio(1000 * n, ms)
        if any(result.labels.proposer != "none" for result in results):
            figures["draft_n"] = sum(result.stats.drafted for result in results)
            figures["draft_n_accepted"] = sum(result.stats.accepted for result in results)
        return {"timings": figures}


def _ratio(part: float, total: float) -> float:
    return round(part / total, 3) if total else 0.0
