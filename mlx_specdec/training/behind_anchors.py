"""Attention of many drafts at once, each behind its own anchor of a text.

A query sees the rows of its text before its anchor, and whatever stands behind the same anchor.
"""

from __future__ import annotations

import mlx.core as mx

from ..models.speculators.layers import Attention

KeysValues = tuple[mx.array, mx.array]


def attend(
    attention: Attention, queries: mx.array, seen: KeysValues, own: KeysValues, anchors: mx.array
) -> mx.array:
    """-> (texts, anchors x m, width).

    queries: (texts x anchors, heads, m, head_dim). seen: keys and values of the texts' rows,
    (texts, kv_heads, rows, head_dim) each. own: of what stands behind each anchor, (texts x
    anchors, kv_heads, k, head_dim). anchors: (texts, anchors) int32, how many rows each sees.
    """
    (texts, count), (keys, values) = anchors.shape, own
    together, heads, slots, depth = queries.shape
    kv_heads, rows = keys.shape[1], seen[0].shape[2]
    groups = heads // kv_heads
    by_anchor = (together, kv_heads, groups * slots)
    by_text = (texts, kv_heads, groups * count * slots)

    queries = queries.reshape(*by_anchor, depth) * depth**-0.5
    inside = _by_text(queries @ keys.swapaxes(-1, -2), count, groups)
    before = _by_text(queries, count, groups).reshape(*by_text, depth) @ seen[0].swapaxes(-1, -2)
    before = before.reshape(*inside.shape[:-1], rows)
    hidden = mx.arange(rows) >= anchors[:, None, None, :, None, None]
    scores = mx.concatenate([mx.where(hidden, -mx.inf, before), inside], axis=-1)
    before, inside = mx.split(mx.softmax(scores, axis=-1), [rows], axis=-1)
    mixed = _by_anchor(
        (before.reshape(*by_text, rows) @ seen[1]).reshape(*inside.shape[:-1], depth)
    )
    mixed = mixed + _by_anchor(inside) @ values

    by_slot = mixed.reshape(texts, count, heads, slots, depth).swapaxes(2, 3)
    return attention.o_proj(by_slot.reshape(texts, count * slots, heads * depth))


def _by_text(array: mx.array, count: int, groups: int) -> mx.array:
    """(texts x anchors, kv_heads, groups x m, n) -> (texts, kv_heads, groups, anchors, m, n)."""
    together, kv_heads, rows, width = array.shape
    parts = array.reshape(together // count, count, kv_heads, groups, rows // groups, width)
    return parts.transpose(0, 2, 3, 1, 4, 5)


def _by_anchor(array: mx.array) -> mx.array:
    """The way back."""
    texts, kv_heads, groups, count, slots, width = array.shape
    return array.transpose(0, 3, 1, 2, 4, 5).reshape(texts * count, kv_heads, groups * slots, width)
