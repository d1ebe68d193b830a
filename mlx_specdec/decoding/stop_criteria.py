"""Where a text ends, and what each step emits of it: tokens, printable text, logprobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from ..text.stream import StopStrings, TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token and its natural log-probability in the target, before temperature, penalties
    and filters. top: the likeliest tokens of its position with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: mx.array, tokens: Sequence[int], top: int, vocabulary: int
) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of the tokens that a sequence got in one pass; waits for them.

    logits: (m, width), row i about token i; m is at least the number of tokens. top: how many of
    the likeliest to list. vocabulary: columns beyond it are padding.
    """
    rows = logits[: len(tokens), :vocabulary].astype(mx.float32)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), dtype=mx.int32)[:, None], axis=-1)
    top = min(top, vocabulary)
    best = mx.argpartition(-rows, max(0, top - 1), axis=-1)[:, :top]
    values = mx.take_along_axis(rows, best, axis=-1)
    mx.eval(chosen, best, values)
    ids: Any = best.tolist()
    logprobs: Any = chosen.tolist()
    theirs: Any = values.tolist()
    return tuple(
        TokenLogprob(
            token,
            logprobs[at][0],
            tuple(sorted(zip(ids[at], theirs[at], strict=True), key=lambda each: -each[1])),
        )
        for at, token in enumerate(tokens)
    )


FinishReason = Literal["eos", "length", "stop", "interrupted", "damaged", "stuck", "failed"]


@dataclass(frozen=True)
class Piece:
    """A part of the printable text; `drafted` says whether accepted draft tokens completed it."""

    text: str
    drafted: bool


@dataclass(frozen=True)
class Emission:
    """The output of one step for one sequence.

    tokens: newly emitted ids, an EOS included. pieces: the text that became printable with them,
    EOS and stop strings left out. finish_reason: None while the text goes on. logprobs: of the
    tokens, where they are requested. drafted: how many of the tokens, from the front, were drafted.
    stop: the stop string that ended the text, "" where none did.
    """

    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    stop: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class StopCriteria:
    """Takes committed tokens in order and says where to stop.

    eos: ids that end the text wherever they appear. max_tokens: most tokens that may be emitted.
    remaining: how many may still be emitted.
    """

    def __init__(
        self,
        *,
        eos: Collection[int],
        max_tokens: int,
        stream: TextStream,
        stops: StopStrings | None,
    ) -> None:
        self._eos = frozenset(eos)
        self.remaining = max(0, max_tokens)
        self._stream = stream
        self._stops = stops
        self._stopped = False

    def take(self, tokens: Sequence[int], drafted: int) -> Emission:
        """Emit tokens up to the first reason to end.

        drafted: how many of them, from the front, were drafted; the target chose the rest.
        """
        taken, reason = self._cut(tokens)
        stretches = [(taken[:drafted], True), (taken[drafted:], False)]
        if self._stops is not None:
            stretches = [([token], index < drafted) for index, token in enumerate(taken)]
        emitted: list[int] = []
        pieces: list[Piece] = []
        for ids, is_draft in stretches:
            if not ids:
                continue
            emitted += ids
            if text := self._print([token for token in ids if token not in self._eos]):
                pieces.append(Piece(text, is_draft))
            if self._stopped:
                reason = "stop"
                break
        self.remaining -= len(emitted)
        count = min(drafted, len(emitted))
        if reason is None:
            return Emission(tuple(emitted), tuple(pieces), drafted=count)
        end = self._end(reason, is_draft=len(emitted) <= drafted)
        pieces += end.pieces
        return replace(end, tokens=tuple(emitted), pieces=tuple(pieces), drafted=count)

    def finish(self, reason: FinishReason) -> Emission:
        """End here, with nothing more to emit than text held back so far."""
        return self._end(reason, is_draft=False)

    def _end(self, reason: FinishReason, *, is_draft: bool) -> Emission:
        rest = self._rest()
        # What was held back may complete a stop string only now.
        return Emission(
            (),
            (Piece(rest, is_draft),) if rest else (),
            "stop" if self._stopped else reason,
            stop="" if self._stops is None else self._stops.met,
        )

    def _cut(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        taken = list(tokens[: self.remaining])
        for index, token in enumerate(taken):
            if token in self._eos:
                return taken[: index + 1], "eos"
        return taken, "length" if len(taken) == self.remaining else None

    def _print(self, ids: Sequence[int]) -> str:
        text = self._stream.push(ids) if ids else ""
        if self._stops is None:
            return text
        safe, self._stopped = self._stops.push(text)
        if not self._stopped and self._stops.would_stop(self._stream.pending()):
            safe += self._rest()
        return safe

    def _rest(self) -> str:
        if self._stopped:
            return ""
        text = self._stream.finish()
        if self._stops is None:
            return text
        safe, self._stopped = self._stops.push(text)
        return safe if self._stopped else safe + self._stops.finish()
