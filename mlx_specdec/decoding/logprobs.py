"""How likely the target itself held each token, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


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
