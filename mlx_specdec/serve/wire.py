"""The objects that OpenAI's clients read, and llama.cpp's `timings` beside them.

Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.logprobs import TokenLogprob
from ..decoding.run import Result
from ..decoding.stop_criteria import Emission
from .asked import Asked
from .figures import speculative_decoding, timings, usage
from .problems import Problem

Told = dict[str, Any]
REASONS = {"eos": "stop", "stop": "stop"}
"""How ends are called on the wire; every other one is that of a text that was cut."""
LEAST = -9999.0
"""Of a logprob on the wire: JSON has no infinity."""
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass
class Choice:
    """One answer in the making. result: once it has ended by itself."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    reason: str | None = None
    result: Result | None = None

    def take(self, emission: Emission, result: Result | None) -> None:
        """What a step gave."""
        self.texts.append(emission.text)
        self.logprobs += emission.logprobs
        self.tokens += len(emission.tokens)
        self.result = result
        if result is not None:
            self.reason = REASONS.get(result.finish_reason, "length")

    def cut(self) -> None:
        """No more comes, whatever was to come."""
        self.reason = self.reason or "length"


class Wire(ABC):
    """What the two kinds of completions have in common. model: its name. pieces: the bytes that
    each token id stands for, where logprobs are told. metrics: tell vLLM's figures as well."""

    whole = ""
    chunk = ""
    done = b"data: [DONE]\n\n"
    named = False
    prefix = ""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        pieces: Sequence[bytes | None] = (),
        *,
        metrics: bool = False,
    ) -> None:
        self._pieces = pieces
        self._metrics = metrics
        self._offsets: Counter[int] = Counter()
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def answer(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        """The whole answer at once."""
        told = [self._whole(index, each) for index, each in enumerate(choices)]
        return {
            **self._head,
            "object": self.whole,
            "choices": told,
            **self._figures(choices, prompt_tokens),
        }

    def first(self, index: int) -> list[Told]:
        """The chunks before a choice's first text."""
        return []

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """A chunk of text, if there is some."""
        if not (emission.text or emission.logprobs):
            return []
        piece = self._piece(index, emission.text, emission.logprobs)
        return [self._chunk([{**piece, "finish_reason": None}])]

    def end(self, index: int, choice: Choice) -> list[Told]:
        """A choice's last chunk."""
        end = {**self._piece(index, ""), "finish_reason": choice.reason}
        return [{**self._chunk([end]), **timings([choice])}]

    def rest(self, choices: Sequence[Choice], asked: Asked) -> list[Told]:
        """The chunk behind the last one, for those who ask for it."""
        if not asked.include_usage:
            return []
        return [{**self._chunk([]), **self._figures(choices, asked.prompt_tokens)}]

    def error(self, problem: Problem) -> Told:
        """What ends a stream early."""
        return problem.as_dict()

    def _figures(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        told = {"usage": usage(choices, prompt_tokens), **timings(choices)}
        return {**told, **speculative_decoding(choices)} if self._metrics else told

    def _chunk(self, choices: list[Told]) -> Told:
        return {**self._head, "object": self.chunk, "choices": choices}

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> Told:
        """A choice in an answer that is no stream."""

    @abstractmethod
    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        """A choice in a chunk of a stream."""

    def _token(self, id: int, logprob: float) -> Told:
        piece = (self._pieces[id] if id < len(self._pieces) else None) or b""
        token = piece.decode("utf-8", "replace")
        return {"token": token, "logprob": max(LEAST, logprob), "bytes": list(piece)}


class ChatWire(Wire):
    """/v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self, index: int) -> list[Told]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        told = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([told])]

    def _whole(self, index: int, choice: Choice) -> Told:
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        told = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        return {**told, "finish_reason": choice.reason}

    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Told | None:
        if not logprobs:
            return None
        content = [
            {
                **self._token(each.token, each.logprob),
                "top_logprobs": [self._token(*other) for other in each.top],
            }
            for each in logprobs
        ]
        return {"content": content, "refusal": None}


class TextWire(Wire):
    """/v1/completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def _whole(self, index: int, choice: Choice) -> Told:
        piece = self._piece(index, "".join(choice.texts), choice.logprobs)
        return {**piece, "finish_reason": choice.reason}

    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs)}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Told | None:
        if not logprobs:
            return None
        tokens = [self._token(each.token, each.logprob) for each in logprobs]
        offsets = []
        for each in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(each["token"])
        others = ([self._token(*other) for other in each.top] for each in logprobs)
        return {
            "tokens": [_key(each) for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{_key(one): one["logprob"] for one in each} for each in others],
            "text_offset": offsets,
        }


def event(told: Told, *, named: bool = False) -> bytes:
    """A chunk as a server-sent event; named: by its type."""
    name = f"event: {told['type']}\n" if named else ""
    return f"{name}data: {json.dumps(told, ensure_ascii=False)}\n\n".encode()


def _key(token: Told) -> str:
    """A name that no other token has: parts of characters, which look alike, by their bytes."""
    data = bytes(token["bytes"])
    if "\ufffd" in token["token"]:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return str(token["token"])
