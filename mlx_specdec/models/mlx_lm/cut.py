"""Reduction of a model of mlx-lm to some of its layers.

The other layers stay in the list and pass hidden states on unchanged. Many families decide by a
layer's number whether the layer attends to a window, and which cache the mask is made from. Only
the layers that are computed have caches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from ..patches import LEFT_OUT, WATCHED


@dataclass
class _LayerCall:
    """Observations about a layer's call in a pass.

    Attributes:
        caches: Numbers of the caches that the layer is called with.
        more: The number of values that the layer returns after the hidden states."""

    caches: set[int] = field(default_factory=set)
    more: int = 0


def cut(network: nn.Module, kept: Sequence[int]) -> None:
    """Have a network compute only some of its layers from now on.

    Args:
        network: The network, which must not share its modules with another one.
        kept: The numbers of the layers that are still computed.
    Raises:
        Exception: Whatever the network raises in a pass over one token."""
    layers: Sequence[nn.Module] = network.layers
    if len(kept) == len(layers):
        return
    calls = _observed_calls(network, layers)
    for number, layer in enumerate(layers):
        if number not in kept:
            _skip(layer, calls[number].more)
    empty = make_prompt_cache(network)
    of_no_layer = set(range(len(empty))).difference(*(call.caches for call in calls))
    numbers = sorted(of_no_layer.union(*(calls[number].caches for number in kept)))
    kinds = [_kind_of(cache) for cache in empty]
    # The model indexes caches by their old numbers, and may make a mask from a dropped cache. That
    # cache is replaced by a remaining one of the same kind, or by an empty one if there is none.
    same_kind = {kinds[number]: place for place, number in enumerate(numbers)}
    places = {number: place for place, number in enumerate(numbers)}
    sources = [places.get(number, same_kind.get(kind)) for number, kind in enumerate(kinds)]

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


def _observed_calls(network: nn.Module, layers: Sequence[nn.Module]) -> list[_LayerCall]:
    """Observe the layers' calls while a pass over one token is built. Nothing is computed."""
    caches = make_prompt_cache(network)
    owners = {id(part): number for number, cache in enumerate(caches) for part in _parts(cache)}
    calls = [_LayerCall() for _ in layers]

    def observe(record: _LayerCall, plain: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        record.caches |= {owners[id(value)] for value in values if id(value) in owners}
        result = plain(layer, *args, **kwargs)
        record.more = len(result) - 1 if isinstance(result, tuple) else 0
        return result

    try:
        for layer, record in zip(layers, calls, strict=True):
            WATCHED.extend([layer], __call__=partial(observe, record))
        network(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    finally:
        for layer in layers:
            WATCHED.undo(layer)
    return calls


def _skip(layer: nn.Module, more: int) -> None:
    def call(plain: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = next(iter((*args, *kwargs.values())))
        return (states, *[None] * more) if more else states

    LEFT_OUT.extend([layer], __call__=call)
    # Models read other attributes of layers and their parts, so only the weights are freed.
    for module in layer.modules():
        for name, part in list(module.items()):
            if isinstance(part, mx.array):
                module[name] = mx.zeros([0] * part.ndim, part.dtype)


def _parts(cache: Any) -> list[Any]:
    """Return a cache, and its members if it is a CacheList."""
    return [cache, *cache.caches] if isinstance(cache, CacheList) else [cache]


def _kind_of(cache: Any) -> tuple[Any, ...]:
    """Return the class and size of a cache. Caches of equal class and size make equal masks."""
    if isinstance(cache, CacheList):
        return tuple(map(_kind_of, cache.caches))
    return type(cache), getattr(cache, "max_size", None), getattr(cache, "chunk_size", None)
