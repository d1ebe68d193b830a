"""The objects that OpenAI's clients read of a chat: what is said, thought and called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..decoding.logprobs import TokenLogprob
from ..decoding.stop_criteria import Emission
from .events import Call, Event, Text, calls_of, texts_of
from .reading import Reader
from .wire import Choice, Told, Wire


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
