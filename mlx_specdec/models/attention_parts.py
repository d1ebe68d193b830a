"""Attention over a few query rows at a time, in calls that Metal's vector kernel takes. The limits
are from `has_fused_kernel` in the Metal back end of MLX 0.32.4."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from .exact import rows_attend_alone
from .number_format import on_cpu

FEW = 32
"""The most query rows of a pass that is divided. Longer passes read prompts."""
ROWS, QUERIES = 8, 32
"""Limits of a call of the vector kernel: query rows, and query rows times the query heads for each
key-value head."""
SIZES = frozenset({(64, 64), (96, 64), (96, 96), (128, 128), (192, 128), (256, 256)})
"""The head sizes of keys and values that the vector kernel takes within these limits."""
WIDE, WIDE_GROUP, WIDE_KEYS = 512, 8, 1024
"""A head size that the vector kernel takes only for a single row without an array mask. The row
must have exactly 8 query heads for each key-value head, and at least 1,024 keys."""

PROMPT_SIZES = frozenset({(64, 64), (72, 72), (80, 80), (96, 64), (96, 96), (128, 128)})
"""The head sizes of keys and values for which MLX fuses the attention of every longer pass. Other
sizes are fused for few shapes of passes or for none."""

Attend = Callable[[mx.array, Any, Any, Any], mx.array]
"""An attention, called with queries, keys, values and a mask."""


def attend_by_kernel(
    attend: Attend,
    queries: mx.array,
    keys: Any,
    values: Any,
    mask: Any,
    window: int | None = None,
) -> mx.array:
    """Return an attention, computed by Metal's vector kernel if that can be had by dividing rows.

    A pass of 2 to FEW rows that exceeds the kernel's limits is divided into calls within them, at
    any number of keys. The kernel that computes single rows then computes every row by itself. A
    whole pass would take about five kernels and round its scores to half precision, or, beyond 8
    rows, take the kernel for prompts. Nothing is measured, so that no forward pass computes
    anything at once. Passes stay whole on a CPU and with CUDA. In a pass of an exact context every
    row attends in a call of its own, on any device.

    Args:
        attend: Computes the attention of some rows.
        queries: Shape (batch, heads, rows, head size).
        keys: Shape (batch, key-value heads, n, head size).
        values: Shape (batch, key-value heads, n, value size).
        mask: None, "causal", or an array that is broadcast to (..., rows, n).
        window: The most keys that a row of a windowed cache sees, if there is a window.
    """
    rows = queries.shape[2]
    if 1 < rows <= FEW and rows_attend_alone():
        single = in_single_rows(queries, keys, values, mask, window)
        return mx.concatenate([attend(*part) for part in single], axis=2)
    if 1 < rows <= FEW and not on_cpu() and not mx.cuda.is_available():
        most = kernel_rows(queries, keys, values, mask)
        if 0 < most < rows:
            parts = in_parts(most, queries, keys, values, mask)
            return mx.concatenate([attend(*part) for part in parts], axis=2)
    return attend(queries, keys, values, mask)


def kernel_rows(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> int:
    """Return how many of the query rows one call of the vector kernel takes, or 0 if it takes none.
    The arguments are those of `attend_by_kernel`."""
    heads, rows, size = queries.shape[1:]
    group, count = heads // keys.shape[1], keys.shape[2]
    if size == WIDE == values.shape[3]:
        # The first of several causal rows sees `rows` - 1 keys fewer than the last one.
        enough = group == WIDE_GROUP and count - rows + 1 >= WIDE_KEYS
        return int(enough and not isinstance(mask, mx.array))
    if (size, values.shape[3]) not in SIZES:
        return 0
    return min(ROWS, QUERIES // group, count)


def in_parts(
    most: int, queries: mx.array, keys: Any, values: Any, mask: Any
) -> Iterator[tuple[mx.array, Any, Any, Any]]:
    """Yield queries, and the keys, values and mask that they need, for `most` rows at a time. Keys
    and values may also be tuples of quantized parts."""
    rows = queries.shape[2]
    for first in range(0, rows, most):
        last = min(first + most, rows)
        shown, part = (keys, values), mask
        if isinstance(mask, str):  # "causal": keys after the last of these rows are not read
            end = last - rows or None
            shown = tree_map(lambda array, end=end: array[..., :end, :], shown)
            part = mask if last - first > 1 else None
        elif mask is not None and mask.shape[-2] > 1:
            part = mask[..., first:last, :]
        yield queries[:, :, first:last], *shown, part


def in_single_rows(
    queries: mx.array, keys: Any, values: Any, mask: Any, window: int | None = None
) -> Iterator[tuple[mx.array, Any, Any, Any]]:
    """Yield each query row of one sequence with the keys, values and mask that a pass of this row
    alone would have. A kernel divides its sum by the number of keys and by their order, so the keys
    of later rows are left out, and so are those that have left the window.

    Args:
        queries: Shape (1, heads, rows, head size).
        keys: Shape (1, key-value heads, n, head size), or a tuple of quantized parts.
        values: Like keys.
        mask: None if every row sees all keys, as in cross-attention. Otherwise the last row sees
            the newest key, and each row before it one key less.
        window: See `attend_by_kernel`."""
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
