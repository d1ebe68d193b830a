"""What is called in the place of mlx-lm's attention, in the same arithmetic: passes of a few rows
over a latent or a long cache, and rows over a quantized one, whose scores would fill the memory."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import base

from ..number_format import on_cpu
from . import latent

NAME = "scaled_dot_product_attention"
SCORES_NBYTES = 64 << 20
"""In memory at a time, of a layer over a quantized cache whose single rows do not take more."""
KERNEL_ROWS, KERNEL_QUERIES = 8, 32
"""Of one call of Metal's kernel for few rows: rows, and rows for each key-value head together."""
FEW, LONG = 32, 4096
"""Most rows of a pass, and fewest keys, whose attention may be divided into such calls."""
CALLS, TURNS, GAIN = 4, 3, 0.95
"""Calls behind one another that are timed together, how often, and the ratio of times that pays."""
_all_rows = base.quantized_scaled_dot_product_attention


def replace_in(network: nn.Module) -> None:
    """Have the modules of a network call `attend`, if it is mlx-lm's attention that they call."""
    for kind in {kind for module in network.modules() for kind in type(module).__mro__}:
        scope = getattr(kind.__dict__.get("__call__"), "__globals__", {})
        if scope.get(NAME) is base.scaled_dot_product_attention:
            scope[NAME] = attend


def attend(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    """mlx-lm's attention; absorbed, or in calls of a few rows, where that is faster."""
    absorbed = latent.absorbed(queries, keys, values, cache, scale, mask)
    if absorbed is not None:
        return absorbed

    def whole(*given: Any) -> Any:
        *shown, mask = given
        return base.scaled_dot_product_attention(*shown, cache, scale, mask, sinks)

    def divided(*given: Any) -> Any:
        return mx.concatenate([whole(*part) for part in in_parts(most, *given)], axis=2)

    given, way, rows = (queries, keys, values, mask), whole, queries.shape[2]
    if isinstance(keys, mx.array) and rows <= FEW and keys.shape[2] >= LONG:
        most = min(KERNEL_ROWS, KERNEL_QUERIES * keys.shape[1] // queries.shape[1])
        way = divided if 0 < most < rows and _pays(whole, divided, *given) else whole
    return way(*given)


def in_parts(
    most: int, queries: mx.array, keys: Any, values: Any, mask: Any
) -> Iterator[tuple[mx.array, Any, Any, Any]]:
    """Yield queries, and the keys, values and mask that they need, for `most` rows at a time."""
    rows = queries.shape[2]
    for first in range(0, rows, most):
        last = min(first + most, rows)
        shown, part = (keys, values), mask
        if isinstance(mask, str):  # "causal": keys behind the last of these rows are not read
            end = last - rows or None
            shown = tree_map(lambda array, end=end: array[..., :end, :], shown)
            part = mask if last - first > 1 else None
        elif mask is not None and mask.shape[-2] > 1:
            part = mask[..., first:last, :]
        yield queries[:, :, first:last], *shown, part


_measured: dict[tuple[Any, ...], bool] = {}


def _pays(
    whole: Callable[..., Any], divided: Callable[..., Any], queries: mx.array, *given: Any
) -> bool:
    """Whether it is faster to divide such a call on this machine: measured once for a shape of
    heads, a number of rows and a doubling of the keys. Never on a CPU, which has no such kernel."""
    if on_cpu():
        return False
    keys, values, mask = given
    kind = type(mask), keys.shape[2].bit_length(), keys.shape[:2], values.shape[3]
    shape = (*queries.shape, queries.dtype, *kind)
    if shape not in _measured:
        seconds: dict[Any, list[float]] = {whole: [], divided: []}
        for _ in range(TURNS + 1):
            for way, taken in seconds.items():
                mx.eval(queries, given)
                began, rows = time.perf_counter(), queries
                for _ in range(CALLS):
                    rows = queries + 0 * way(rows, *given)[..., :1]
                mx.eval(rows)
                taken.append(time.perf_counter() - began)
        # The first turn compiles kernels.
        long, short = (median(taken[1:]) for taken in seconds.values())
        _measured[shape] = short < GAIN * long
    return _measured[shape]


def attend_in_parts(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **how: int
) -> mx.array:
    """mlx-lm's attention over a quantized cache, which has no fused kernel, a few query rows at a
    time: their scores would otherwise take more memory than quantizing the cache saves."""
    batch, heads, rows, _ = queries.shape
    # Scores, what the mask leaves of them, and their softmax.
    row = 3 * batch * heads * keys[0].shape[-2] * queries.dtype.size
    most = max(1, SCORES_NBYTES // row)
    if rows <= most:
        return _all_rows(queries, keys, values, scale, mask, **how)
    done = []
    for few, some_keys, some_values, part in in_parts(most, queries, keys, values, mask):
        done.append(_all_rows(few, some_keys, some_values, scale, part, **how))
        # One after the other, or the scores of all would be in memory together.
        mx.eval(done[-1])
    return mx.concatenate(done, axis=2)
