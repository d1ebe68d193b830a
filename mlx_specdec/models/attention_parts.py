"""Division of attention into calls with a few query rows, which Metal's vector kernel accepts. The
kernel's limits are from `has_fused_kernel` in the Metal back end of MLX 0.32.4."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from .exact import rows_stand_alone
from .number_format import on_cpu

FEW = 32
"""The most query rows of a pass that is divided. Longer passes prefill prompts."""
KERNEL_ROWS, KERNEL_QUERIES = 8, 32
"""Limits of a call of the vector kernel: query rows, and query rows times query heads per key-value
head."""
KERNEL_SIZES = frozenset({(64, 64), (96, 64), (96, 96), (128, 128), (192, 128), (256, 256)})
"""The head sizes of keys and values that the vector kernel accepts within these limits."""
WIDE, WIDE_GROUP, WIDE_KEYS = 512, 8, 1024
"""A head size that the vector kernel accepts only for a single row without an array mask. The row
must have 8 query heads per key-value head, and at least 1,024 keys."""

PROMPT_SIZES = frozenset({(64, 64), (72, 72), (80, 80), (96, 64), (96, 96), (128, 128)})
"""The head sizes of keys and values for which MLX has a fused kernel for all longer passes. Other
sizes have a fused kernel for few shapes of passes, or for none."""

Attend = Callable[[mx.array, Any, Any, Any], mx.array]
"""A function that computes attention from queries, keys, values and a mask."""


def attend_by_kernel(
    attend: Attend,
    queries: mx.array,
    keys: Any,
    values: Any,
    mask: Any,
    window: int | None = None,
) -> mx.array:
    """Compute attention, and divide the query rows if Metal's vector kernel then accepts them.

    The vector kernel is also the kernel of single rows. If a pass of 2 to FEW rows exceeds the
    kernel's limits, the rows are divided into several calls within the limits. Without this
    division MLX would use about five kernels, and round the scores to half precision. With more
    than 8 rows it would use the kernel for prompts. The decision depends on shapes only, so that
    the pass stays lazy. Rows are not divided on a CPU or with CUDA.

    In a pass of an exact context every row gets a call of its own, on all devices.

    Args:
        queries: Shape (batch, heads, rows, head size).
        keys: Shape (batch, key-value heads, n, head size).
        values: Shape (batch, key-value heads, n, value size).
        mask: None, "causal", or an array that is broadcast to (..., rows, n).
        window: Number of keys in the window of a windowed cache, otherwise None."""
    rows = queries.shape[2]
    if 1 < rows <= FEW and rows_stand_alone():
        single = in_single_rows(queries, keys, values, mask, window)
        return mx.concatenate([attend(*part) for part in single], axis=2)
    if 1 < rows <= FEW and not on_cpu() and not mx.cuda.is_available():
        most = kernel_rows(queries, keys, values, mask)
        if 0 < most < rows:
            parts = in_parts(most, queries, keys, values, mask)
            return mx.concatenate([attend(*part) for part in parts], axis=2)
    return attend(queries, keys, values, mask)


def kernel_rows(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> int:
    """Return how many query rows one call of the vector kernel accepts, or 0 if it accepts none.
    See `attend_by_kernel` for the arguments."""
    heads, rows, size = queries.shape[1:]
    group, count = heads // keys.shape[1], keys.shape[2]
    if size == WIDE == values.shape[3]:
        # The first of several causal rows sees `rows` - 1 keys fewer than the last one.
        enough = group == WIDE_GROUP and count - rows + 1 >= WIDE_KEYS
        return int(enough and not isinstance(mask, mx.array))
    if (size, values.shape[3]) not in KERNEL_SIZES:
        return 0
    return min(KERNEL_ROWS, KERNEL_QUERIES // group, count)


def in_parts(
    most: int, queries: mx.array, keys: Any, values: Any, mask: Any
) -> Iterator[tuple[mx.array, Any, Any, Any]]:
    """Yield the queries, keys, values and mask of each part of at most `most` query rows. Keys and
    values may also be tuples of quantized parts."""
    rows = queries.shape[2]
    for first in range(0, rows, most):
        last = min(first + most, rows)
        shown, part = (keys, values), mask
        if isinstance(mask, str):  # "causal": leave out the keys after the last row of the part
            end = last - rows or None
            shown = tree_map(lambda array, end=end: array[..., :end, :], shown)
            part = mask if last - first > 1 else None
        elif mask is not None and mask.shape[-2] > 1:
            part = mask[..., first:last, :]
        yield queries[:, :, first:last], *shown, part


def in_single_rows(
    queries: mx.array, keys: Any, values: Any, mask: Any, window: int | None = None
) -> Iterator[tuple[mx.array, Any, Any, Any]]:
    """Yield the query, keys, values and mask of each row, as in a pass over this row alone.

    The number and order of the keys decide in which order a kernel adds, and so how it rounds.
    Therefore masked keys are left out: the keys of later rows, and keys that have left the window.

    The arguments are those of `attend_by_kernel`, for one sequence. If there is a mask, the last
    row sees the newest key, and each earlier row one key less."""
    rows, count = queries.shape[2], tree_flatten(keys)[0][1].shape[2]
    causal = isinstance(mask, str) or (mask is not None and mask.shape[-2] > 1)
    for row in range(rows):
        end = count - rows + row + 1 if causal else count
        first = max(0, end - window) if causal and window is not None else 0
        shown = tree_map(lambda part, to=slice(first, end): part[..., to, :], (keys, values))
        row_mask = None if isinstance(mask, str) else mask
        if row_mask is not None and causal:
            row_mask = row_mask[..., row : row + 1, first:end]
        yield queries[:, :, row : row + 1], *shown, row_mask
