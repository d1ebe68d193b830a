"""Arithmetic that rules over a chain of drafted tokens share. Pure functions on arrays."""

from __future__ import annotations

import mlx.core as mx

from ..contracts import Proposal
from ..sampling.choices import choose


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


def entries(rows: mx.array, tokens: mx.array, outside: float = 0.0) -> mx.array:
    """The entry of each row at its token, `outside` for ids that rows do not have.

    rows: (batch, n, vocabulary); tokens: (batch, n) int32. Returns (batch, n).
    """
    last = rows.shape[-1] - 1
    index = mx.minimum(tokens, last)[..., None]
    inside = mx.take_along_axis(rows, index, axis=-1)[..., 0]
    return mx.where(tokens > last, mx.array(outside, dtype=rows.dtype), inside)


def one_hot(tokens: mx.array, vocabulary: int, dtype: mx.Dtype) -> mx.array:
    """The distribution that puts everything on one token: (...) int32 -> (..., vocabulary)."""
    return (tokens[..., None] == mx.arange(vocabulary)).astype(dtype)


def draft_probabilities(proposal: Proposal, vocabulary: int) -> mx.array:
    """What the drafted tokens were drawn from, (batch, n, vocabulary) float32.

    A row is zero where it is damaged (NaN or infinite), where nothing was proposed, and where it is
    one-hot on an id that the target does not have: rules then reject, and correct from p alone,
    which is exact.
    """
    if proposal.rows is None:
        return one_hot(proposal.tokens, vocabulary, mx.float32)
    q = mx.softmax(proposal.rows, axis=-1)
    return mx.where(q >= 0, q, 0.0)


def draw(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """The Gumbel-max choice of each row, and -1 where a row has no finite maximum.

    log_p: (batch, vocabulary), up to a constant; gumbel: the same or None. Returns (batch,) int32.
    """
    finite = mx.isfinite(mx.max(log_p, axis=-1))
    return mx.where(finite, choose(log_p, gumbel), -1)
