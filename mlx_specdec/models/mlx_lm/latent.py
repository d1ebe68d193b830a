"""Passes of a few rows through latent attention (DeepSeek's MLA). mlx-lm attends to the latent
itself, "absorbed", where a pass has one row, and for more rows first makes keys and values of every
head for the whole cache, with 30 times the arithmetic and other roundings. Here its modules' code
runs as it is, and their attention is intercepted: keys and values are lazy, and never computed
where nobody reads them. They are recognized by identity; shapes would also match other arrays."""

import threading
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, mla

from ..patches import LATENT


class _Expanded(NamedTuple):
    """What a module made of a latent, (batch, 1, keys, rank), for every head."""

    module: nn.Module
    latent: mx.array
    heads: mx.array


class _Recent(threading.local):
    """The newest keys and values, until attention takes them, and how often it was absorbed."""

    keys: _Expanded | None = None
    values: _Expanded | None = None
    absorbed = 0


_recent = _Recent()


def absorbed_calls() -> int:
    """Return how many calls of attention were absorbed in this thread."""
    return _recent.absorbed


def _noted(plain: Any, module: nn.Module, given: mx.array, transpose: bool = True) -> mx.array:
    """Note what a module expands: keys where it is called with transpose=False, then values of the
    same latent."""
    result: mx.array = plain(module, given, transpose)
    if not transpose:
        _recent.keys, _recent.values = _Expanded(module, given, result), None
    elif _recent.keys is not None and given is _recent.keys.latent:
        _recent.values = _Expanded(module, given, result)
    return result


def most_rows(rank: int, widths: int) -> int:
    """Return the number of rows up to which absorbing takes less arithmetic over a long cache.
    widths: of a head's keys and values together. One number for all lengths of the cache, so that a
    sequence's arithmetic does not depend on the others of its batch."""
    return rank * widths // max(1, 2 * rank - widths)


def absorbed(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any
) -> mx.array | None:
    """Return the attention to the newest latent, if these are the keys and values that were made of
    it, and the rows are few; otherwise None."""
    made, expanded = _recent.keys, _recent.values
    _recent.keys = _recent.values = None
    if made is None or expanded is None or values is not expanded.heads:
        return None
    width = made.heads.shape[-1]
    if queries.shape[2] > most_rows(made.latent.shape[-1], width + values.shape[-1]):
        return None
    if keys is not made.heads:
        # Mistral 4 appends the rotated parts to both, and has the scores of none by itself.
        rotated = getattr(cache, "values", None)
        if rotated is None or keys.shape[-1] != width + rotated.shape[-1]:
            return None
        rotated = rotated[..., : keys.shape[2], :]
        mask = _scores(queries[..., width:] * scale, rotated, mask)
        queries = queries[..., :width]
    _recent.absorbed += 1
    rows, latent = made.module(queries), made.latent
    mixed = base.scaled_dot_product_attention(rows, latent, latent, cache, scale, mask)
    result: mx.array = expanded.module(mixed)
    return result


def _scores(queries: mx.array, keys: mx.array, mask: mx.array | str | None) -> mx.array:
    """Scaled scores, (batch, heads, rows, keys), of rows whose last one sees all keys."""
    scores = queries @ keys.swapaxes(-1, -2)
    if isinstance(mask, str):
        rows, columns = scores.shape[-2:]
        mask = mx.arange(columns) <= mx.arange(columns - rows, columns)[:, None]
    lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    return scores if mask is None else mx.where(mask, scores, lowest)


def expanding(network: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a network that mlx-lm absorbs for one row alone."""
    if hasattr(mla, "max_absorbed_queries"):  # A later mlx-lm does it by itself.
        return []
    return [each for each in network.modules() if "embed_q" in each and "unembed_out" in each]


def intercept(attentions: list[nn.Module]) -> None:
    """Have passes of a few rows absorbed from now on, if `attention.replace_in` was called."""
    LATENT.extend(
        (each for each in _parts(attentions) if not LATENT.applied(each)), __call__=_noted
    )


def release(attentions: list[nn.Module]) -> None:
    """Leave these modules to mlx-lm again."""
    for module in _parts(attentions):
        LATENT.undo(module)


def _parts(attentions: list[nn.Module]) -> list[nn.Module]:
    return [part for each in attentions for part in (each.embed_q, each.unembed_out)]
