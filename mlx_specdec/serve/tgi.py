"""What clients of Hugging Face's text-generation-inference say and hear: /generate and its stream.

Texts never have the stop string in them, as everywhere here; TGI keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..decoding.stop_criteria import Emission, TokenLogprob
from . import formats
from .body import Body
from .figures import Choice
from .problems import Problem
from .requests import Asked, Asking
from .wire import LEAST, Told

SAME = (
    "frequency_penalty",
    "max_tokens",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
)
"""Parameters that are fields of a completion."""
FLAT: Mapping[str, tuple[int, ...]] = {"temperature": (1,), "top_k": (-1,), "top_p": (1,)}
"""What shapes a distribution, and the values that shape none."""
REASONS = {"eos": "eos_token", "stop": "stop_sequence"}
ERRORS = {400: (422, "validation"), 429: (429, "overloaded"), 500: (424, "generation")}


def ask(asking: Asking, body: Body, stream: bool | None) -> Asked:
    """What a body for /generate asks for. stream: by the path; None leaves it to the body. Raises
    Problem."""
    body = asking.read("GenerateRequest", body)
    told = body.get("parameters", {})
    own = {name: told[name] for name in SAME if name in told}
    # As in TGI, whatever shapes a distribution draws from it, and a temperature of 1 shapes none.
    shaped = any(own.get(name, 0) not in (*flat, 0) for name, flat in FLAT.items())
    if told.get("do_sample") or shaped:
        own.setdefault("temperature", 1.0)
    elif own.get("temperature") == 1:
        own["temperature"] = 0.0
    if "grammar" in told:
        own |= formats.of_tgi(told["grammar"])
    if stream is None:
        stream = body.get("stream", False)
    # Its stream tells the logprob of every token.
    return asking.completions({**own, "prompt": body["inputs"], "logprobs": 0, "stream": stream})


def error(problem: Problem) -> tuple[int, Told]:
    """A problem as TGI tells it: status and body."""
    status, kind = ERRORS.get(problem.status, (problem.status, "incomplete_generation"))
    return status, {"error": problem.message, "error_type": kind}


class TgiWire:
    """As wire.Wire, for a single choice. pieces: the bytes that each token id stands for. special:
    ids that are never printed."""

    done = b""
    named = False

    def __init__(
        self, body: Body, asked: Asked, pieces: Sequence[bytes | None], special: Collection[int]
    ) -> None:
        told = body.get("parameters") or {}
        self._before = body["inputs"] if told.get("return_full_text") else ""
        self._details = bool(told.get("details"))
        self._seed = asked.requests[0].options.seed
        self._input_length = asked.prompt_tokens
        self._pieces = pieces
        self._special = special
        self._index = 0
        self._ended = False

    def answer(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        """The whole answer at once."""
        [choice] = choices
        told: Told = {"generated_text": self._text(choice)}
        if self._details:
            tokens = [self._token(each) for each in choice.logprobs]
            told["details"] = {**self._end(choice), "prefill": [], "tokens": tokens}
        return told

    def slow(self, index: int) -> bool:
        """Nothing takes long."""
        return False

    def first(self, index: int) -> list[Told]:
        """Nothing comes before the first token."""
        return []

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """An event for each token; the last one of all has the whole text."""
        tokens = [self._token(each) for each in emission.logprobs]
        if "".join(each["text"] for each in tokens) != emission.text and tokens:
            # Parts of characters, and what was held back: the text comes with the last of them that
            # is no special one, whose text clients pass over.
            for each in tokens:
                each["text"] = ""
            last = next((each for each in reversed(tokens) if not each["special"]), tokens[-1])
            last |= {"text": emission.text, "special": False}
        events = [self._event(each) for each in tokens]
        if events and choice.reason is not None:
            events[-1] |= self._last(choice)
        return events

    def end(self, index: int, choice: Choice) -> list[Told]:
        """What tells the end of a text whose last token did not."""
        if self._ended:
            return []
        nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
        return [{**self._event(nothing), **self._last(choice)}]

    def rest(self, choices: Sequence[Choice], asked: Asked) -> list[Told]:
        """Nothing comes after the end."""
        return []

    def error(self, problem: Problem) -> Told:
        """What ends a stream early."""
        return error(problem)[1]

    def _event(self, token: Told) -> Told:
        self._index += 1
        return {"index": self._index, "token": token, "generated_text": None, "details": None}

    def _last(self, choice: Choice) -> Told:
        self._ended = True
        details = {**self._end(choice), "input_length": self._input_length}
        return {"generated_text": self._text(choice), "details": details}

    def _end(self, choice: Choice) -> Told:
        reason = choice.result.finish_reason if choice.result is not None else "length"
        return {
            "finish_reason": REASONS.get(reason, "length"),
            "generated_tokens": choice.tokens,
            "seed": self._seed,
        }

    def _text(self, choice: Choice) -> str:
        return self._before + "".join(choice.texts)

    def _token(self, each: TokenLogprob) -> dict[str, Any]:
        special = each.token in self._special
        piece = (self._pieces[each.token] if each.token < len(self._pieces) else None) or b""
        return {
            "id": each.token,
            "text": "" if special else piece.decode("utf-8", "replace"),
            "logprob": max(LEAST, each.logprob),
            "special": special,
        }
