"""Arithmetic that every rule over a chain of drafted tokens shares. Pure functions on arrays."""

from __future__ import annotations

import mlx.core as mx

from ..sampling.distribution import choose


def leading(accepted: mx.array) -> mx.array:
    """(batch, n) bool -> (batch, n) bool: True up to, not including, the first False."""
    if accepted.shape[-1] == 0:
        return accepted
    return mx.cumprod(accepted.astype(mx.int32), axis=-1).astype(mx.bool_)


def row_after(rows: mx.array, kept: mx.array) -> mx.array:
    """Row number kept.sum() of each sequence: (batch, n + 1, ...), (batch, n) -> (batch, ...)."""
    if kept.shape[-1] == 0:
        return rows[:, 0]
    count = mx.sum(kept, axis=-1, keepdims=True)
    index = count.reshape(count.shape + (1,) * (rows.ndim - 2))
    return mx.take_along_axis(rows, index, axis=1)[:, 0]


def draw(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """The Gumbel-max choice of each row, and -1 where a row has no finite maximum.

    log_p: (batch, vocabulary), up to a constant; gumbel: the same or None. Returns (batch,) int32.
    """
    finite = mx.isfinite(mx.max(log_p, axis=-1))
    return mx.where(finite, choose(log_p, gumbel), -1)
