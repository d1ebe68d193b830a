"""What Anthropic's clients say and hear: /v1/messages."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ..decoding.stop_criteria import Emission
from . import body as fields
from .asked import Asked, Asking
from .body import Body
from .chat import text_of
from .figures import cached_tokens
from .problems import Problem, unsupported, wrong
from .wire import Choice, Told

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "speculative")
"""Fields that are fields of a chat completion."""
HARMLESS: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "output_config": (),
    "output_format": (),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}
"""Fields that would change the answer and cannot here, with values that change nothing."""
REASONS = {"eos": "end_turn", "stop": "stop_sequence"}
TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def ask(asking: Asking, body: Body) -> Asked:
    """What a body for /v1/messages asks for. Raises Problem."""
    if "max_tokens" not in body:
        raise wrong("max_tokens must be given", "max_tokens")
    for name, values in HARMLESS.items():
        if name in body and not any(body[name] == value for value in values):
            raise unsupported(name)
    own = {name: body[name] for name in SAME if name in body}
    return asking.chat({**own, "stop": _stops(body), "messages": messages(body)})


def messages(body: Body) -> list[Told]:
    """The messages of a body, those of the system first, as a chat completion has them."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong('messages must be a list of {"role": ..., "content": ...}', "messages")
    if "system" not in body:
        return given
    return [{"role": "system", "content": text_of(body["system"], "system")}, *given]


def _stops(body: Body) -> list[str]:
    return fields.strings("stop_sequences", body.get("stop_sequences", []))


def error(problem: Problem) -> Told:
    """A problem as Anthropic's clients read it."""
    told = problem.as_dict()["error"]
    kind = TYPES.get(problem.status, told["type"])
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


class MessagesWire:
    """As wire.Wire, for a single choice. model: its name."""

    done = b""
    named = True

    def __init__(self, model: str, body: Body, asked: Asked) -> None:
        self._model = model
        self._stops = _stops(body)
        self._input = asked.prompt_tokens

    def answer(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        """The whole answer at once."""
        [choice] = choices
        content = [{"type": "text", "text": "".join(choice.texts)}]
        told = {**self._message(content, choice.tokens), **self._end(choice)}
        return {**told, "usage": self._usage(choice)}

    def first(self, index: int) -> list[Told]:
        """What comes before the first text."""
        block = {"type": "text", "text": ""}
        return [
            {"type": "message_start", "message": self._message([], 0)},
            {"type": "content_block_start", "index": 0, "content_block": block},
        ]

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """An event of text, if there is some."""
        delta = {"type": "text_delta", "text": emission.text}
        told = {"type": "content_block_delta", "index": 0, "delta": delta}
        return [told] if emission.text else []

    def end(self, index: int, choice: Choice) -> list[Told]:
        """What comes after the last text."""
        usage = self._usage(choice)
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": self._end(choice), "usage": usage},
            {"type": "message_stop"},
        ]

    def rest(self, choices: Sequence[Choice], asked: Asked) -> list[Told]:
        """Nothing comes after the end."""
        return []

    def error(self, problem: Problem) -> Told:
        """What ends a stream early."""
        return error(problem)

    def _message(self, content: list[Told], tokens: int) -> Told:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._input, "output_tokens": tokens},
        }

    def _usage(self, choice: Choice) -> Told:
        """Tokens as Anthropic counts them: what was not read again is no input."""
        cached = cached_tokens([choice], self._input)
        told = {"input_tokens": self._input - cached, "cache_read_input_tokens": cached}
        return {**told, "output_tokens": choice.tokens}

    def _end(self, choice: Choice) -> Told:
        reason = choice.result.finish_reason if choice.result is not None else "length"
        # Of several nobody has kept which one it was.
        stop = self._stops[0] if reason == "stop" and len(self._stops) == 1 else None
        return {"stop_reason": REASONS.get(reason, "max_tokens"), "stop_sequence": stop}
