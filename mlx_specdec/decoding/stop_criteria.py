"""How likely the target itself held each token, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..text.stream import StopStrings, TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was emitted, and its natural logarithm. top: the likeliest tokens of its
    position with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: mx.array, tokens: Sequence[int], top: int, vocabulary: int
) -> tuple[TokenLogprob, ...]:
    """Of the tokens that a sequence got in one pass; waits for them.

    logits: (m, width), row i about token i; m is at least the number of tokens. top: how many of
    the likeliest to tell. vocabulary: columns beyond it are padding.
    """
    rows = logits[: len(tokens), :vocabulary].astype(mx.float32)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), dtype=mx.int32)[:, None], axis=-1)
    top = min(top, vocabulary)
    best = mx.argpartition(-rows, max(0, top - 1), axis=-1)[:, :top]
    values = mx.take_along_axis(rows, best, axis=-1)
    mx.eval(chosen, best, values)
    own, ids, theirs = _read(chosen), _read(best), _read(values)
    told = []
    for at, token in enumerate(tokens):
        ranked = sorted(zip(ids[at], theirs[at], strict=True), key=lambda each: -each[1])
        told.append(TokenLogprob(token, own[at][0], tuple(ranked)))
    return tuple(told)


def _read(array: mx.array) -> Any:
    """To the host, waiting for it."""
    return array.tolist()


FinishReason = Literal["eos", "length", "stop", "interrupted", "damaged", "stuck", "failed"]


@dataclass(frozen=True)
class Piece:
    """A part of the printable text; `drafted` says whether accepted draft tokens completed it."""

    text: str
    drafted: bool


@dataclass(frozen=True)
class Emission:
    """What one step gave the reader.

    tokens: newly emitted ids, an EOS included. pieces: the text that became printable with them,
    EOS and stop strings left out. finish_reason: None while the text goes on. logprobs: of the
    tokens, where they are asked for. drafted: how many of the tokens, from the front, were drafted.
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
        """All pieces together."""
        return "".join(piece.text for piece in self.pieces)


class StopCriteria:
    """Takes committed tokens in order and says where to stop.

    eos: ids that end the text wherever they appear. max_tokens: most tokens that may be emitted.
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
        self._remaining = max(0, max_tokens)
        self._stream = stream
        self._stops = stops
        self._stopped = False

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self._remaining

    def take(self, tokens: Sequence[int], drafted: int) -> Emission:
        """Emit tokens up to the first reason to end.

        drafted: how many of them, from the front, were drafted; the rest are the target's own.
        """
        kept, reason = self._cut(tokens)
        parts = [(kept[:drafted], True), (kept[drafted:], False)]
        if self._stops is not None:
            parts = [([token], index < drafted) for index, token in enumerate(kept)]
        emitted: list[int] = []
        pieces: list[Piece] = []
        for ids, is_draft in parts:
            if ids:
                emitted += ids
                _append(pieces, self._print(ids), is_draft)
            if self._stopped:
                reason = "stop"
                break
        self._remaining -= len(emitted)
        if reason is not None:
            _append(pieces, self._rest(), len(emitted) <= drafted)
            # What was held back may complete a stop string only now.
            reason = "stop" if self._stopped else reason
        count = min(drafted, len(emitted))
        return Emission(tuple(emitted), tuple(pieces), reason, drafted=count, stop=self._met)

    def finish(self, reason: FinishReason) -> Emission:
        """End here, with nothing more to emit than text held back so far."""
        pieces: list[Piece] = []
        _append(pieces, self._rest(), False)
        reason = "stop" if self._stopped else reason
        return Emission((), tuple(pieces), reason, stop=self._met)

    @property
    def _met(self) -> str:
        return "" if self._stops is None else self._stops.met

    def _cut(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        kept = list(tokens[: self._remaining])
        for index, token in enumerate(kept):
            if token in self._eos:
                return kept[: index + 1], "eos"
        return kept, "length" if len(kept) == self._remaining else None

    def _print(self, ids: Sequence[int]) -> str:
        return self._hold([token for token in ids if token not in self._eos])

    def _hold(self, ids: Sequence[int]) -> str:
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


def _append(pieces: list[Piece], text: str, drafted: bool) -> None:
    if text:
        pieces.append(Piece(text, drafted))
