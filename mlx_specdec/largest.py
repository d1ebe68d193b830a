"""Search for the largest entries of rows as wide as a vocabulary, without sorting the rows. MLX's
own top-k sorts complete rows on a GPU.

The search has two stages. The first one cuts a row into segments, and takes the k segments with the
largest maxima. The second one searches these segments, and the few entries after the last segment.
No other segment has a larger entry than any of the k maxima, so the k largest entries are found,
even if entries are equal."""

import math

import mlx.core as mx

LEAST_ENTRIES, LEAST_WIDTH = 1 << 14, 4
"""The least number of entries in all rows, and in a segment, for which two stages are faster than
MLX's own top-k. Measured on a CPU, on which MLX selects in linear time. A GPU gains earlier."""


def largest(rows: mx.array, k: int) -> mx.array:
    """Return the k largest entries of each row, in no particular order.

    Args:
        rows: (..., n), any float dtype. NaN is larger than every number.
        k: Number of entries, 1 to n.
    Returns:
        (..., k), the dtype of the rows.
    """
    contenders = _contenders(rows, k)
    few = rows if contenders is None else mx.take_along_axis(rows, contenders, axis=-1)
    return mx.topk(few, k, axis=-1)


def indices_of_largest(rows: mx.array, k: int) -> mx.array:
    """Return the indices of the k largest entries of each row, in no particular order. If several
    entries equal the k-th largest, any of them are chosen.

    Args:
        rows: (..., n), any float dtype. NaN is larger than every number.
        k: Number of entries, 1 to n.
    Returns:
        (..., k) uint32.
    """
    contenders = _contenders(rows, k)
    if contenders is None:
        return mx.argpartition(rows, -k, axis=-1)[..., -k:]
    few = mx.take_along_axis(rows, contenders, axis=-1)
    chosen = mx.argpartition(few, -k, axis=-1)[..., -k:]
    return mx.take_along_axis(contenders, chosen, axis=-1)


def _contenders(rows: mx.array, k: int) -> mx.array | None:
    """Return the indices that the second stage searches, (..., m) uint32, or None if one stage is
    enough."""
    size = rows.shape[-1]
    # This width lets both stages search about sqrt(size * k) entries.
    width = math.isqrt(size // k)
    if rows.size < LEAST_ENTRIES or width < LEAST_WIDTH:
        return None
    end = size - size % width
    segments = rows[..., :end].reshape(*rows.shape[:-1], end // width, width)
    best = mx.argpartition(mx.max(segments, axis=-1), -k, axis=-1)[..., -k:]
    inside = best[..., None] * width + mx.arange(width, dtype=mx.uint32)
    inside = inside.reshape(*rows.shape[:-1], k * width)
    rest = mx.broadcast_to(mx.arange(end, size, dtype=mx.uint32), (*rows.shape[:-1], size - end))
    return mx.concatenate([inside, rest], axis=-1)
