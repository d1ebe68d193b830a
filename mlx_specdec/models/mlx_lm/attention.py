"""The attention function that replaces mlx-lm's in networks, with the same arithmetic. It absorbs a
pass of a few rows into a latent, or divides the pass for Metal's vector kernel. It divides the
query rows over a quantized cache because the scores of all rows would fill the memory."""

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from ..attention_parts import FEW, attend_by_kernel, in_parts
from ..exact import rows_stand_alone
from ..patches import ATTENTION, RECURRENCES
from . import latent
from .caches import WindowCache

ATTENTION_FUNCTION = "scaled_dot_product_attention"
SCORES_NBYTES = 64 << 20
"""Upper bound on the bytes of attention scores that exist at once in a layer with a quantized
cache. A single row may exceed this bound."""
SINGLE_ROWS: dict[str, tuple[int, Sequence[str], str]] = {
    "ssm_update": (1, ("hidden_states", "B", "C", "dt"), "state"),
    "recurrent_gla": (2, ("q", "k", "v"), "h"),
    "wkv7_kernel": (1, ("r", "w", "k", "v", "a", "b"), "state"),
}
"""Recurrences of mlx-lm whose single rows are computed in another way than several rows: of
Mamba 2, Bailing's hybrids and RWKV 7. The axis of the rows, the arguments that have it, and the
argument with the state."""
_all_rows = base.quantized_scaled_dot_product_attention


def replace_in(network: nn.Module) -> None:
    """Replace mlx-lm's attention function by `attend` in the Python modules that define the
    network's classes."""
    for scope in _scopes(network):
        if vars(scope).get(ATTENTION_FUNCTION) is base.scaled_dot_product_attention:
            ATTENTION.apply(scope, ATTENTION_FUNCTION, attend)


def divide_recurrences(network: nn.Module) -> None:
    """Let exact passes of the network call the functions in SINGLE_ROWS for each row."""
    for scope in _scopes(network):
        for name in SINGLE_ROWS.keys() & vars(scope).keys():
            RECURRENCES.wrap(scope, **{name: partial(_row_by_row, *SINGLE_ROWS[name])})


def _scopes(network: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define a network's classes."""
    classes = {parent for module in network.modules() for parent in type(module).__mro__}
    return [sys.modules[name] for name in {parent.__module__ for parent in classes}]


def _row_by_row(
    axis: int, names: Sequence[str], state: str, plain: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a recurrence. In an exact pass, call it for each row.

    Args:
        axis, names, state: See SINGLE_ROWS.
        plain: The recurrence. It returns its result and the next state."""
    named = inspect.signature(plain).bind(*args, **kwargs).arguments
    rows = named[names[0]].shape[axis]
    if not (1 < rows <= FEW and rows_stand_alone()):
        return plain(*args, **kwargs)
    results = []
    for parts in zip(*[mx.split(named[name], rows, axis) for name in names], strict=True):
        result, named[state] = plain(**named | dict(zip(names, parts, strict=True)))
        results.append(result)
    return mx.concatenate(results, axis), named[state]


def attend(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    """Compute mlx-lm's attention, and absorb or divide a pass of a few rows. The arguments are
    the same as in mlx-lm."""
    absorbed = latent.absorbed(queries, keys, values, cache, scale, mask)
    if absorbed is not None:
        return absorbed

    def mixed(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        result: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks
        )
        return result

    if isinstance(keys, mx.array) or rows_stand_alone():
        window = cache.max_size if isinstance(cache, WindowCache) else None
        return attend_by_kernel(mixed, queries, keys, values, mask, window)
    # The vector kernel does not read quantized caches.
    return mixed(queries, keys, values, mask)


def attend_in_parts(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **how: int
) -> mx.array:
    """Compute mlx-lm's attention over a quantized cache, a few query rows at a time. MLX has no
    fused kernel for it, and the scores of all rows would take more memory than quantization
    saves."""
    batch, heads, rows, _ = queries.shape
    # A row needs three arrays: the scores, the masked scores and their softmax.
    row_nbytes = 3 * batch * heads * keys[0].shape[-2] * queries.dtype.size
    most = max(1, SCORES_NBYTES // row_nbytes)
    if rows <= most:
        return _all_rows(queries, keys, values, scale, mask, **how)
    done = []
    for few, some_keys, some_values, part in in_parts(most, queries, keys, values, mask):
        done.append(_all_rows(few, some_keys, some_values, scale, part, **how))
        # Evaluate each part before the next one, or all scores would be in memory together.
        mx.eval(done[-1])
    return mx.concatenate(done, axis=2)
