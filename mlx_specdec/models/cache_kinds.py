"""Which caches a decoder-only model is given: its own, quantized ones, or windows of a given size.

What a model cannot use is refused here, before anything is decoded.
A quantized cache is one from the first token on, so that no pass sees it change, and a window
keeps no first tokens: mlx-lm masks those away in passes of several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..cache_settings import CacheSettings
from ..errors import OptionError, first_line
from .kv_cache import STEP

MakeCaches = Callable[[], list[Any]]


def cache_maker(network: nn.Module, settings: CacheSettings) -> MakeCaches:
    """A function that makes a sequence's empty caches, one entry a layer.

    Raises OptionError where the model cannot work with such caches.
    """
    if settings.bits is None and settings.max_size is None:
        return lambda: make_prompt_cache(network)
    own = make_prompt_cache(network)
    others = sorted({type(cache).__name__ for cache in own if type(cache) is not KVCache})
    if others:
        flag = "max-kv-size" if settings.bits is None else "kv-bits"
        raise OptionError(
            f"{_name(network)} models bring caches of their own ({', '.join(others)}): leave "
            f"{flag} out"
        )
    if settings.max_size is not None:
        size = settings.max_size
        return lambda: [RotatingKVCache(max_size=size, keep=0) for _ in own]

    def quantized() -> list[Any]:
        bits = settings.bits or 8
        return [QuantizedKVCache(group_size=settings.group_size, bits=bits) for _ in own]

    _try(network, quantized(), settings)
    return quantized


def nbytes_with(caches: Sequence[Any], columns: int) -> int:
    """Bytes of a sequence's caches once they hold `columns` tokens; they have seen one by now.

    Buffers grow in steps, windows up to their size; recurrent state has one size for ever.
    """
    total = 0
    for cache in caches:
        keys = getattr(cache, "keys", None)
        if isinstance(cache, CacheList):
            total += nbytes_with(cache.caches, columns)
        elif keys is None:
            total += int(cache.nbytes)
        else:
            allocated = (keys[0] if isinstance(keys, tuple) else keys).shape[-2]
            most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            held = -(-columns // STEP) * STEP
            held = min(held, most) if most else held
            total += int(cache.nbytes) * held // allocated
    return total


def _try(network: nn.Module, caches: list[Any], settings: CacheSettings) -> None:
    # Shapes are checked as soon as the graph is built; nothing is computed.
    try:
        network(mx.zeros((1, 2), dtype=mx.int32), cache=caches)
    except ValueError as problem:
        raise OptionError(
            f"{_name(network)} cannot use a quantized cache with groups of "
            f"{settings.group_size}: {first_line(problem)}"
        ) from None
    except Exception as problem:
        # Arithmetic of its own, which takes no packed keys.
        raise OptionError(
            f"{_name(network)} models cannot read a quantized cache: leave kv-bits out"
        ) from problem


def _name(network: nn.Module) -> str:
    return type(network).__module__.rpartition(".")[2]
