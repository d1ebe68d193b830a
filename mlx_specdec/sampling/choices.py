"""The best entry of each row, and how far it is above the second best."""

from __future__ import annotations

import mlx.core as mx

SEGMENTS = 256
"""Of a row of the vocabulary, when its two largest entries are looked for; measured."""


def choose(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """The Gumbel-max choice of each row: argmax(log p + g), plain argmax without noise.

    log_p: (..., vocabulary), up to a constant; gumbel broadcasts to it. Returns (...) int32.
    """
    scored = log_p if gumbel is None else log_p + gumbel
    return mx.argmax(scored, axis=-1).astype(mx.int32)


def margin(scored: mx.array) -> mx.array:
    """How far the best entry of each row is above the second best; 0 where two are equal.

    scored: (..., vocabulary), at least two entries. Returns (...) float32: infinite where there is
    no second candidate, NaN where the best entry is no finite number.
    """
    few = _contenders(scored)
    top = mx.max(few, axis=-1)
    others = without(few, mx.argmax(few, axis=-1, keepdims=True))
    lead = (top - mx.max(others, axis=-1)).astype(mx.float32)
    return mx.where(mx.isfinite(top), lead, mx.nan)


def _contenders(scored: mx.array) -> mx.array:
    """A few entries of each row, the two largest among them.

    Rows are cut into segments: the second largest is in the same segment as the largest, or is the
    largest of another one. Copies of whole rows, which this avoids, are most of its cost.
    """
    width = scored.shape[-1] // SEGMENTS
    if width < 2:
        return scored
    cut = SEGMENTS * width
    segments = scored[..., :cut].reshape(*scored.shape[:-1], SEGMENTS, width)
    largest = mx.max(segments, axis=-1)
    best = mx.argmax(largest, axis=-1, keepdims=True)
    own = mx.take_along_axis(segments, best[..., None], axis=-2)[..., 0, :]
    return mx.concatenate([own, without(largest, best), scored[..., cut:]], axis=-1)


def without(rows: mx.array, index: mx.array) -> mx.array:
    """The rows whose entry at `index`, (..., 1), is -inf."""
    return mx.put_along_axis(rows, index, mx.array(-mx.inf, dtype=rows.dtype), axis=-1)
