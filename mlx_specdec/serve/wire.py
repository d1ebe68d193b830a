"""The objects that OpenAI's clients read of completions, and llama.cpp's `timings` beside them.

Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..decoding.stop_criteria import Emission, TokenLogprob
from .figures import Choice, speculative_decoding, timings, usage
from .problems import Problem
from .reading import Call, Event, Reader, Text, calls_of, texts_of
from .requests import Asked

Told = dict[str, Any]
LEAST = -9999.0
"""Of a logprob on the wire: JSON has no infinity."""
KEEP_ALIVE = b": keep-alive\n\n"


class Wire(ABC):
    """What the two kinds of completions have in common. model: its name. asked: what is answered.
    pieces: the bytes that each token id stands for, where logprobs are told. metrics: tell vLLM's
    figures as well."""

    whole = ""
    chunk = ""
    done = b"data: [DONE]\n\n"
    named = False
    prefix = ""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        asked: Asked,
        pieces: Sequence[bytes | None] = (),
        *,
        metrics: bool = False,
    ) -> None:
        self._asked = asked
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

    def slow(self, index: int) -> bool:
        """Whether the next piece of a choice or its end may take long to read."""
        return False

    def first(self, index: int) -> list[Told]:
        """The chunks before a choice's first text."""
        return []

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """Chunks of text, if there is some; to those who ask, of drafts and of others apart."""
        if not self._asked.include_drafted:
            return [self._chunk([each]) for each in self._told(index, emission)]
        told = []
        for part in _by_drafted(emission):
            pieces = self._told(index, part) or [self._piece(index, "")]
            counts = [len(part.tokens), *[0] * (len(pieces) - 1)]
            for piece, tokens in zip(pieces, counts, strict=True):
                drafted = {"drafted": part.drafted > 0, "tokens": tokens}
                told.append(self._chunk([{**piece, **drafted}]))
        return told

    def end(self, index: int, choice: Choice) -> list[Told]:
        """A choice's last chunk, and what was held back before it."""
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
        told = {**self._head, "object": self.chunk, "choices": choices}
        return {**told, "usage": None} if self._asked.include_usage else told

    def _told(self, index: int, emission: Emission) -> list[Told]:
        """A choice in chunks of what a step gave."""
        if not (emission.text or emission.logprobs):
            return []
        return [self._piece(index, emission.text, emission.logprobs)]

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> Told:
        """A choice in an answer that is no stream."""

    @abstractmethod
    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        """A choice in a chunk of a stream that goes on."""

    def _token(self, id: int, logprob: float) -> Told:
        piece = self._pieces[id] if id < len(self._pieces) else None
        # Logits may be wider than the vocabulary: tokens without a text are told apart as in vLLM.
        token = f"token_id:{id}" if piece is None else piece.decode("utf-8", "replace")
        return {"token": token, "logprob": max(LEAST, logprob), "bytes": list(piece or b"")}


class TextWire(Wire):
    """/v1/completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def first(self, index: int) -> list[Told]:
        """The prompt, for those who want it before the text."""
        return [self._chunk([self._piece(index, each)]) for each in self._echoed(index)]

    def _whole(self, index: int, choice: Choice) -> Told:
        text = "".join([*self._echoed(index), *choice.texts])
        return {**self._piece(index, text, choice.logprobs), "finish_reason": choice.reason}

    def _echoed(self, index: int) -> Sequence[str]:
        return self._asked.echoed[index : index + 1]

    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        told = {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs)}
        return {**told, "finish_reason": None}

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
    # In ASCII: clients that ask httpx for lines also end them at U+0085, U+2028 and U+2029.
    return f"{name}data: {json.dumps(told)}\n\n".encode()


def _by_drafted(emission: Emission) -> list[Emission]:
    """What a step gave of accepted drafts, and what the target gave itself."""
    count = emission.drafted
    parts = [
        Emission(
            emission.tokens[:count] if drafted else emission.tokens[count:],
            tuple(each for each in emission.pieces if each.drafted == drafted),
            logprobs=emission.logprobs[:count] if drafted else emission.logprobs[count:],
            drafted=count if drafted else 0,
        )
        for drafted in (True, False)
    ]
    return [each for each in parts if each.tokens or each.text]


def _key(token: Told) -> str:
    """A name that no other token has: parts of characters, which look alike, by their bytes."""
    data = bytes(token["bytes"])
    if "\ufffd" in token["token"]:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return str(token["token"])


class ChatWire(Wire):
    """/v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._readers: dict[int, Reader] = {}

    def slow(self, index: int) -> bool:
        """Whether a call is being read."""
        return index in self._readers and self._readers[index].inside

    def first(self, index: int) -> list[Told]:
        """Who speaks."""
        if self._asked.reader is not None:
            self._readers[index] = self._asked.reader()
        return [self._chunk([self._delta(index, {"role": "assistant", "content": ""})])]

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """As Wire has it; as at OpenAI, the token that ends a text has no logprob."""
        if emission.finish_reason == "eos":
            emission = replace(emission, logprobs=emission.logprobs[:-1])
        return super().piece(index, choice, emission)

    def end(self, index: int, choice: Choice) -> list[Told]:
        """A choice's last chunk, and what was held back before it."""
        reader = self._readers.get(index)
        rest = [] if reader is None else reader.finish()
        held = [self._chunk([self._delta(index, _delta(each))]) for each in rest]
        [last] = super().end(index, choice)
        if reader is not None:
            last["choices"][0]["finish_reason"] = _reason(choice, reader)
        return [*held, last]

    def _whole(self, index: int, choice: Choice) -> Told:
        message: Told = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        reason = choice.reason
        if self._asked.reader is not None:
            reader = self._asked.reader()
            events = reader.push("".join(choice.texts)) + reader.finish()
            message |= _message(events)
            reason = _reason(choice, reader)
        ended = choice.result is not None and choice.result.finish_reason == "eos"
        logprobs = self._logprobs(choice.logprobs[:-1] if ended else choice.logprobs)
        told = {"index": index, "message": message, "logprobs": logprobs}
        return {**told, "finish_reason": reason}

    def _told(self, index: int, emission: Emission) -> list[Told]:
        reader = self._readers.get(index)
        if reader is None:
            return super()._told(index, emission)
        told = [self._delta(index, _delta(each)) for each in reader.push(emission.text)]
        if emission.logprobs:
            told = told or [self._piece(index, "")]
            told[0]["logprobs"] = self._logprobs(emission.logprobs)
        return told

    def _piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        return self._delta(index, {"content": text} if text else {}, logprobs)

    def _delta(self, index: int, delta: Told, logprobs: Sequence[TokenLogprob] = ()) -> Told:
        told = {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs)}
        return {**told, "finish_reason": None}

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


def _delta(event: Event) -> Told:
    """What a delta tells of something that was read."""
    if isinstance(event, Text):
        return {"content" if event.kind == "content" else "reasoning_content": event.text}
    call: Told = {"index": event.index}
    if isinstance(event, Call):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{**call, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{**call, "function": {"arguments": event.text}}]}


def _message(events: Sequence[Event]) -> Told:
    """What a message tells of all that was read."""
    message: Told = {"content": texts_of(events, "content")}
    if reasoning := texts_of(events, "reasoning"):
        message["reasoning_content"] = reasoning
    if calls := calls_of(events):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
            for call, arguments in calls
        ]
    return message


def _reason(choice: Choice, reader: Reader) -> str | None:
    return "tool_calls" if choice.reason == "stop" and reader.called else choice.reason
