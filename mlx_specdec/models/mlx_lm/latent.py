"""Absorption of latent attention (DeepSeek's MLA) in passes of a few rows.

In a pass of one row mlx-lm attends to the latent itself, which is called "absorbed". In longer
passes mlx-lm first expands the latent of the whole cache to the keys and values of every head. That
takes 30 times the arithmetic and rounds differently. Here mlx-lm's modules run unchanged, and the
attention function that they call uses the latent instead of their keys and values. Those are lazy,
so that they are never computed. They are recognized by identity, because other arrays can have the
same shape."""

import threading
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, mla

from ..attention_parts import attend_by_kernel
from ..patches import LATENT


class _Expanded(NamedTuple):
    """The keys or values of every head that a module expanded from a latent, (batch, 1, keys,
    rank)."""

    module: nn.Module
    latent: mx.array
    heads: mx.array


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
        _recent.keys, _recent.values = _Expanded(module, latent, result), None
    elif _recent.keys is not None and latent is _recent.keys.latent:
        _recent.values = _Expanded(module, latent, result)
    return result


def most_rows(rank: int, widths: int) -> int:
    """Return the number of rows up to which absorption takes less arithmetic over a long cache. The
    length of the cache does not count, so that a sequence's arithmetic does not depend on the rest
    of its batch.

    Args:
        rank: Width of the latent.
        widths: Width of a head's keys plus width of its values."""
    return rank * widths // max(1, 2 * rank - widths)


def absorbed(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any
) -> mx.array | None:
    """Return the attention to the newest latent, or None if the rows are many, or the keys and
    values were not expanded from this latent. The arguments are those of mlx-lm's attention."""
    expanded_keys, expanded_values = _recent.keys, _recent.values
    _recent.keys = _recent.values = None
    if expanded_keys is None or expanded_values is None or values is not expanded_values.heads:
        return None
    width = expanded_keys.heads.shape[-1]
    if queries.shape[2] > most_rows(expanded_keys.latent.shape[-1], width + values.shape[-1]):
        return None
    if keys is not expanded_keys.heads:
        # Mistral 4 appends the rotated parts to queries and keys. Other models pass the scores of
        # the rotated parts as the mask, so make such a mask here.
        rotated = getattr(cache, "values", None)
        if rotated is None or keys.shape[-1] != width + rotated.shape[-1]:
            return None
        rotated = rotated[..., : keys.shape[2], :]
        mask = _scores(queries[..., width:] * scale, rotated, mask)
        queries = queries[..., :width]
    _recent.absorbed += 1
    rows, latent = expanded_keys.module(queries), expanded_keys.latent

    def mixed(rows: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        return base.scaled_dot_product_attention(rows, keys, values, cache, scale, mask)

    attended = attend_by_kernel(mixed, rows, latent, latent, mask)
    return expanded_values.module(attended)


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
    """Return the attention modules that mlx-lm absorbs in passes of one row only."""
    if hasattr(mla, "max_absorbed_queries"):  # A later mlx-lm absorbs passes of a few rows itself.
        return []
    return [part for part in network.modules() if "embed_q" in part and "unembed_out" in part]


def intercept(attentions: list[nn.Module]) -> None:
    """Record what these modules expand, so that `absorbed` applies from now on. The network must
    call `attention.attend`, which `attention.replace_in` arranges."""
    LATENT.extend(
        (part for part in _parts(attentions) if not LATENT.applied(part)), __call__=_recorded
    )


def release(attentions: list[nn.Module]) -> None:
    """Undo `intercept`."""
    for module in _parts(attentions):
        LATENT.undo(module)


def _parts(attentions: list[nn.Module]) -> list[nn.Module]:
    return [part for module in attentions for part in (module.embed_q, module.unembed_out)]
