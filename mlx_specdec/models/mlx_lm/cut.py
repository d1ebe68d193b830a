"""A model of mlx-lm that computes some of its layers only.

The other layers stay in their places and pass hidden states on. From a layer's place many families
know whether the layer attends to a window, and which cache the mask is made from. Only the layers
that are computed have caches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from ..patches import LEFT_OUT, WATCHED


@dataclass
class _Seen:
    """What a layer takes and returns in a pass.

    Attributes:
        caches: Numbers of the caches that are handed to the layer.
        more: The number of values that the layer returns after the hidden states."""

    caches: set[int] = field(default_factory=set)
    more: int = 0


def cut(network: nn.Module, kept: Sequence[int]) -> None:
    """Compute only these layers from now on, given by their numbers. The network must not share
    its modules with another. Raises what the network raises for one token."""
    layers: Sequence[nn.Module] = network.layers
    if len(kept) == len(layers):
        return
    seen = _watched(network, layers)
    for number, layer in enumerate(layers):
        if number not in kept:
            _skip(layer, seen[number].more)
    empty = make_prompt_cache(network)
    of_no_layer = set(range(len(empty))).difference(*(layer.caches for layer in seen))
    numbers = sorted(of_no_layer.union(*(seen[number].caches for number in kept)))
    looks = [_look(cache) for cache in empty]
    alike = {looks[number]: place for place, number in enumerate(numbers)}
    places = {number: place for place, number in enumerate(numbers)}
    # The mask of layers that are all skipped is made from an empty cache.
    sources = [places.get(number, alike.get(look)) for number, look in enumerate(looks)]

    def make_cache(plain: Any, network: nn.Module) -> list[Any]:
        made = [KVCache() for _ in empty] if plain is None else plain(network)
        return [made[number] for number in numbers]

    def call(
        plain: Any, network: nn.Module, inputs: mx.array, cache: Any = None, **rest: Any
    ) -> Any:
        if cache is not None:
            pairs = zip(sources, empty, strict=True)
            cache = [unused if place is None else cache[place] for place, unused in pairs]
        return plain(network, inputs, cache=cache, **rest)

    LEFT_OUT.extend([network], make_cache=make_cache, __call__=call)


def _watched(network: nn.Module, layers: Sequence[nn.Module]) -> list[_Seen]:
    """Return what each layer takes and returns in a pass over one token; nothing is computed."""
    caches = make_prompt_cache(network)
    owners = {id(part): number for number, cache in enumerate(caches) for part in _parts(cache)}
    seen = [_Seen() for _ in layers]

    def watched(record: _Seen, plain: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        record.caches |= {owners[id(value)] for value in values if id(value) in owners}
        result = plain(layer, *args, **kwargs)
        record.more = len(result) - 1 if isinstance(result, tuple) else 0
        return result

    try:
        for layer, record in zip(layers, seen, strict=True):
            WATCHED.extend([layer], __call__=partial(watched, record))
        network(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    finally:
        for layer in layers:
            WATCHED.undo(layer)
    return seen


def _skip(layer: nn.Module, more: int) -> None:
    def call(plain: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = next(iter((*args, *kwargs.values())))
        return (states, *[None] * more) if more else states

    LEFT_OUT.extend([layer], __call__=call)
    # Models look at numbers and switches of layers and of their parts: only weights go.
    for module in layer.modules():
        for name, part in list(module.items()):
            if isinstance(part, mx.array):
                module[name] = mx.zeros([0] * part.ndim, part.dtype)


def _parts(cache: Any) -> list[Any]:
    """Return a cache, and those in it if it is a list of caches."""
    return [cache, *cache.caches] if isinstance(cache, CacheList) else [cache]


def _look(cache: Any) -> tuple[Any, ...]:
    """Return the kind of a cache: caches that look alike give the same masks."""
    if isinstance(cache, CacheList):
        return tuple(map(_look, cache.caches))
    return type(cache), getattr(cache, "max_size", None), getattr(cache, "chunk_size", None)
