"""Which caches a decoder-only model is given: its own, quantized ones, or windows of a given size.

What a model cannot use is refused here, before anything is decoded.
A quantized cache is one from the first token on, so that no pass sees it change, and a window
keeps no first tokens: mlx-lm masks those away in passes of several rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
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


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a sequence's caches. always: of recurrent state. per_column: for each token in the
    caches, by the most tokens that they hold; None is no limit."""

    always: int
    per_column: Mapping[int | None, int]

    def of(self, columns: int) -> int:
        """Return the bytes with `columns` tokens in the caches; buffers grow in steps."""
        held = -(-columns // STEP) * STEP
        growing = (n * min(held, most or held) for most, n in self.per_column.items())
        return self.always + sum(growing)


def sizes_of(caches: Sequence[Any]) -> CacheSizes:
    """Return the sizes of caches that have seen a token; nothing is computed for it."""
    always, per_column = 0, Counter[int | None]()
    for cache in caches:
        keys = getattr(cache, "keys", None)
        if isinstance(cache, CacheList):
            inner = sizes_of(cache.caches)
            always += inner.always
            per_column.update(inner.per_column)
        elif keys is None:
            always += int(cache.nbytes)
        else:
            columns = (keys[0] if isinstance(keys, tuple) else keys).shape[-2]
            most = getattr(cache, "max_size", None)
            if isinstance(cache, ChunkedKVCache):
                most = cache.chunk_size + STEP
            per_column[most] += int(cache.nbytes) // columns
    return CacheSizes(always, per_column)


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
