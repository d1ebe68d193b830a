"""The attention function that replaces mlx-lm's in networks, with the same arithmetic. It absorbs a
pass of a few rows into a latent, or divides the pass for Metal's vector kernel. It divides the
query rows over a quantized cache because the scores of all rows would fill the memory.

In a pass of one row over a latent (DeepSeek's MLA) mlx-lm attends to the latent itself, which is
called "absorbed". In longer passes mlx-lm first expands the latent of the whole cache to the keys
and values of every head. That takes 30 times the arithmetic and rounds differently. Here mlx-lm's
modules run unchanged, and the attention function that they call uses the latent instead of their
keys and values. They are lazy, so that they are never computed. They are recognized by identity,
because other arrays can have the same shape."""

import inspect
import sys
import threading
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from ..attention_parts import FEW, Attend, attend_by_kernel, in_parts
from ..exact import rows_stand_alone
from ..patches import ATTENTION, LATENT, RECURRENCES
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
    """Call a recurrence. An exact pass calls it for each row.

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

    def mixed(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        result: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks
        )
        return result

    result = absorbed(mixed, queries, keys, values, cache, scale, mask)
    if result is not None:
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


_Expanded = tuple[nn.Module, mx.array, mx.array]
"""A module, the latent that it expanded, (batch, 1, keys, rank), and the keys or values of every
head."""


class _Recent(threading.local):
    """The newest expanded keys and values, until attention uses them, and the number of absorbed
    calls."""

    keys: _Expanded | None = None
    values: _Expanded | None = None
    absorbed = 0


_recent = _Recent()


def absorbed_calls() -> int:
    """Return how many calls of attention were absorbed in this thread."""
    return _recent.absorbed


def _recorded(plain: Any, module: nn.Module, latent: mx.array, transpose: bool = True) -> mx.array:
    """Call a module and record what it expands. Modules expand keys with transpose=False, and then
    values from the same latent."""
    result: mx.array = plain(module, latent, transpose)
    if not transpose:
        _recent.keys, _recent.values = (module, latent, result), None
    elif _recent.keys is not None and latent is _recent.keys[1]:
        _recent.values = module, latent, result
    return result


def absorbed(
    mixed: Attend, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any
) -> mx.array | None:
    """Return the attention to the newest latent, or None if the rows are many, or the keys and
    values were not expanded from this latent. mixed: Computes mlx-lm's attention, which has the
    other arguments."""
    made_keys, made_values = _recent.keys, _recent.values
    _recent.keys = _recent.values = None
    if made_keys is None or made_values is None or values is not made_values[2]:
        return None
    embed, latent, expanded = made_keys
    rank, width = latent.shape[-1], expanded.shape[-1]
    widths = width + values.shape[-1]
    # Up to this number of rows absorption takes less arithmetic over a long cache. The length of
    # the cache does not count, so that a row's arithmetic does not depend on the rest of its batch.
    if queries.shape[2] > rank * widths // max(1, 2 * rank - widths):
        return None
    if keys is not expanded:
        # Mistral 4 appends the rotated parts to queries and keys. Other models pass the scores of
        # the rotated parts as the mask, so make such a mask here.
        rotated = getattr(cache, "values", None)
        if rotated is None or keys.shape[-1] != width + rotated.shape[-1]:
            return None
        rotated = rotated[..., : keys.shape[2], :]
        mask = _scores(queries[..., width:] * scale, rotated, mask)
        queries = queries[..., :width]
    _recent.absorbed += 1
    attended = attend_by_kernel(mixed, embed(queries), latent, latent, mask)
    return made_values[0](attended)


def _scores(queries: mx.array, keys: mx.array, mask: mx.array | str | None) -> mx.array:
    """Return masked scores, (batch, heads, rows, keys), of scaled queries. The last row sees all
    keys."""
    scores = queries @ keys.swapaxes(-1, -2)
    if isinstance(mask, str):
        rows, columns = scores.shape[-2:]
        mask = mx.arange(columns) <= mx.arange(columns - rows, columns)[:, None]
    lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    return scores if mask is None else mx.where(mask, scores, lowest)


def expanding(network: nn.Module) -> list[nn.Module]:
    """Return the modules that expand a latent to keys, and those that expand it to values. mlx-lm
    absorbs them in passes of one row only."""
    found = [part for part in network.modules() if "embed_q" in part and "unembed_out" in part]
    return [part for module in found for part in (module.embed_q, module.unembed_out)]


def intercept(parts: list[nn.Module]) -> None:
    """Record what these modules expand, so that `absorbed` applies from now on. The network must
    call `attention.attend`, which `attention.replace_in` arranges."""
    LATENT.extend((part for part in parts if not LATENT.applied(part)), __call__=_recorded)


def release(parts: list[nn.Module]) -> None:
    """Undo `intercept`."""
    for module in parts:
        LATENT.undo(module)
