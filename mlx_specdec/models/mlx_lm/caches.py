"""Caches of several sequences for mlx-lm's models, whose attention takes positions and masks from
its cache. A rewind changes only lengths, for windows as well: they drop entries much later."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import create_attention_mask

from ..cpu_layers import FEW_ROWS
from ..number_format import on_cpu
from ..rows import KVCache, Place, Rows, Window


class BatchedCache(KVCache):
    """A KV cache of several sequences, with the attributes that mlx-lm's models read."""

    _written: Place | None = None

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: one number if it is the same for all sequences, otherwise
        (batch,) int32."""
        place = self._rows.place
        written = place.rows if self._written is place else 0
        return place.offset + written if written else place.offset

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys. A model in a pipeline replaces it by one that depends on the
        transfer of the hidden states."""
        return self.buffers[0].array

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.buffers[0].array = array

    @property
    def values(self) -> mx.array | None:
        """The values that the newest pass sees, from which `latent` computes a part of Mistral 4's
        scores. A model may replace the buffer."""
        array = self._values.array
        return array[:, :, self.begin() :] if array is not None and self.begin() else array

    @values.setter
    def values(self, array: mx.array) -> None:
        self._values.array = array

    @property
    def place(self) -> Place:
        """The columns of the buffers that the newest pass writes."""
        return self._rows.place

    def begin(self) -> int:
        """Return the first column that a row of the newest pass sees."""
        return 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._written = self._rows.place
        return self.append(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the newest pass has fetched, for layers that share the cache."""
        end, begin = self.place.end, self.begin()
        return self._keys.positions(end)[:, :, begin:], self._values.positions(end)[:, :, begin:]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        place, begin = self.place, self.begin()
        if not place.even:
            mask = place.visible(window_size)[..., begin:]
            return mask if self._rows.mask_axes() == 4 else mask[:, None]
        # On a CPU every layer would turn "causal" into an array again: make the array once.
        array = return_array or (rows <= FEW_ROWS and on_cpu())
        offset = place.starts[0] - begin
        return create_attention_mask(rows, offset, return_array=array, window_size=window_size)

    def stored(self, row: int) -> list[mx.array]:
        """Return the entries of a sequence that its next token may see."""
        length = self._rows.lengths[row]
        return [array[row : row + 1, :, :length] for array in self.state]


class BatchedQuantizedCache(BatchedCache):
    """A BatchedCache with quantized keys and values. Models read `bits` and `group_size`."""

    def __init__(self, rows: Rows, group_size: int, bits: int) -> None:
        super().__init__(rows, parts=3)
        self.group_size = group_size
        self.bits = bits

    def append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        quantize = partial(mx.quantize, group_size=self.group_size, bits=self.bits)
        arrays = *quantize(keys), *quantize(values)
        pairs = zip(self.buffers, arrays, strict=True)
        written = [buffer.write(array, self._rows.place) for buffer, array in pairs]
        return tuple(written[:3]), tuple(written[3:])


class WindowCache(BatchedCache):
    """A BatchedCache whose tokens see only the newest `max_size` entries."""

    def __init__(self, rows: Rows, window: Window) -> None:
        super().__init__(rows)
        self.window = window
        self._first = window.first

    @property
    def max_size(self) -> int:
        return self.window.size

    @property
    def place(self) -> Place:
        return self.window.place

    def begin(self) -> int:
        return self.window.begin

    def append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        place = self.place
        if self._first != self.window.first:
            shift = [a - b for a, b in zip(self.window.first, self._first, strict=True)]
            for buffer in self.buffers:
                buffer.drop(shift)
            self._first = self.window.first
        begin = self.begin()
        written = self._keys.write(keys, place), self._values.write(values, place)
        return written[0][:, :, begin:], written[1][:, :, begin:]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        size = min(window_size or self.max_size, self.max_size)
        limits = not self.place.even or self.place.end - self.begin() > size
        return super().make_mask(rows, return_array, size if limits else None)

    def merge(self, other: KVCache) -> None:
        assert isinstance(other, WindowCache)
        super().merge(other)
        self._first += other._first

    def keep(self, rows: Sequence[int]) -> None:
        self._first = tuple(self._first[row] for row in rows)
        index, lengths = mx.array(list(rows), dtype=mx.int32), self._rows.lengths
        used = max(n - first for n, first in zip(lengths, self._first, strict=True))
        for buffer in self.buffers:
            buffer.keep(index, used)

    def stored(self, row: int) -> list[mx.array]:
        end = self._rows.lengths[row] - self._first[row]
        begin = max(0, end - self.max_size)
        return [array[row : row + 1, :, begin:end] for array in self.state]

    def hold(self, stored: Sequence[Sequence[mx.array] | None]) -> None:
        super().hold(stored)
        held = [0 if arrays is None else arrays[0].shape[2] for arrays in stored]
        self._first = tuple(n - m for n, m in zip(self._rows.lengths, held, strict=True))
        self.window.first = self._first


MakeCache = Callable[[Rows], Any]
"""A function that makes the cache of one layer."""


def batched(cache: Any) -> MakeCache:
    """Return a function that makes the batched equivalent of an empty cache of mlx-lm, or a copy if
    there is no equivalent."""
    if type(cache) is mlx_lm_caches.KVCache:
        return BatchedCache
    if type(cache) is mlx_lm_caches.QuantizedKVCache:
        group_size, bits = cache.group_size, cache.bits
        return lambda rows: BatchedQuantizedCache(rows, group_size, bits)
    if type(cache) is mlx_lm_caches.RotatingKVCache and cache.keep == 0:
        size = cache.max_size
        return lambda rows: WindowCache(rows, rows.window(size))
    if type(cache) is mlx_lm_caches.CacheList:
        members = list(map(batched, cache.caches))
        return lambda rows: mlx_lm_caches.CacheList(*[make(rows) for make in members])
    return copier(cache)


def copier(cache: Any) -> MakeCache:
    """Return a function that makes caches like an empty one of mlx-lm."""
    return lambda _: copy.deepcopy(cache)


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Return all caches, and instead of each CacheList its members."""
    found = []
    for cache in caches:
        inner = isinstance(cache, mlx_lm_caches.CacheList)
        found += leaves(cache.caches) if inner else [cache]
    return found
