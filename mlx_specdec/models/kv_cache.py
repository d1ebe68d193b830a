"""The KV cache of one attention layer, in buffers that are written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .rows import Place, Rows

STEP = 256
"""A buffer of one sequence grows by this number of positions."""
BATCH_STEP = 64
"""A buffer of several sequences grows by this number of positions. It is smaller than STEP, because
every sequence has unused positions, which take memory and are copied when the buffer grows."""


class Buffer:
    """The keys or the values of one layer, (batch, heads, capacity, width)."""

    def __init__(self) -> None:
        self.array: mx.array | None = None

    @property
    def parts(self) -> list[Buffer]:
        return [self]

    def write(self, new: mx.array, place: Place) -> mx.array:
        """Write (batch, heads, m, width) at a place. Return all positions in use."""
        buffer = self.array
        if buffer is None or place.end > buffer.shape[2]:
            capacity = _capacity(place.end, new.shape[0])
            buffer = padded(mx.zeros_like(new[:, :, :0]) if buffer is None else buffer, capacity)
        if place.even:
            buffer[:, :, place.starts[0] : place.end] = new
        else:
            positions = mx.broadcast_to(place.targets, new.shape)
            buffer = mx.put_along_axis(buffer, positions, new, axis=2)
        self.array = buffer
        return buffer[:, :, : place.end]

    def positions(self, end: int) -> mx.array:
        assert self.array is not None
        return self.array[:, :, :end]

    def merge(self, joining: Buffer, batch: int) -> None:
        """Append the sequences of another buffer; together they are `batch` sequences."""
        arrays = [buffer.array for buffer in (self, joining) if buffer.array is not None]
        if not arrays:
            return
        capacity = max(array.shape[2] for array in arrays)
        padded_arrays = [padded(array, capacity) for array in arrays]
        if len(arrays) == 1:
            # One buffer may be empty: a T5's decoder has no positions before its first pass.
            more = (batch - arrays[0].shape[0], *padded_arrays[0].shape[1:])
            empty = mx.zeros(more, dtype=arrays[0].dtype)
            padded_arrays.insert(0 if self.array is None else 1, empty)
        self.array = mx.concatenate(padded_arrays)

    def hold(self, rows: Sequence[mx.array | None]) -> None:
        """Begin with copies of each sequence's positions, (1, heads, positions, width), or None."""
        cached = [row for row in rows if row is not None]
        capacity = _capacity(max(row.shape[2] for row in cached) + 1, len(rows))
        empty = mx.zeros_like(padded(cached[0], capacity))
        self.array = mx.concatenate([empty if r is None else padded(r, capacity) for r in rows])

    def drop(self, counts: Sequence[int]) -> None:
        """Drop the first positions of each sequence, `counts` of them."""
        if (array := self.array) is not None:
            size = array.shape[2] - min(counts)
            rows = [padded(array[row : row + 1, :, n:], size) for row, n in enumerate(counts)]
            self.array = mx.concatenate(rows)

    def keep(self, rows: mx.array, used: int) -> None:
        """Keep only these sequences, (n,) int32, and the capacity that `used` positions need."""
        if self.array is not None:
            self.array = self.array[rows, :, : _capacity(used, rows.size)]


class QuantizedBuffer:
    """A buffer of quantized keys or values, in three parts: packed values, scales and biases."""

    def __init__(self, group_size: int, bits: int) -> None:
        self._group_size = group_size
        self._bits = bits
        self.parts = [Buffer(), Buffer(), Buffer()]

    def write(self, new: mx.array, place: Place) -> tuple[mx.array, ...]:
        arrays = mx.quantize(new, group_size=self._group_size, bits=self._bits)
        parts = zip(self.parts, arrays, strict=True)
        return tuple(part.write(array, place) for part, array in parts)


class KVCache:
    """One layer's keys and values. `buffer` makes the buffer of either."""

    def __init__(self, rows: Rows, buffer: Callable[[], Buffer | QuantizedBuffer] = Buffer) -> None:
        self._rows = rows
        self._keys: Any = buffer()
        self._values: Any = buffer()

    @property
    def buffers(self) -> list[Buffer]:
        return [*self._keys.parts, *self._values.parts]

    @property
    def state(self) -> list[mx.array]:
        return [buffer.array for buffer in self.buffers if buffer.array is not None]

    def append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add keys and values, (batch, heads, m, width). Return the keys and values of all
        positions in use."""
        place = self._rows.place
        return self._keys.write(keys, place), self._values.write(values, place)

    def positions(self, start: int) -> tuple[mx.array, mx.array]:
        end = max(self._rows.ends)
        return self._keys.positions(end)[:, :, start:], self._values.positions(end)[:, :, start:]

    def merge(self, joining: KVCache) -> None:
        """Append the sequences of another cache. The context's rows must have been joined."""
        for buffer, another in zip(self.buffers, joining.buffers, strict=True):
            buffer.merge(another, len(self._rows.lengths))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences. The context's rows must have been filtered."""
        index, used = mx.array(list(rows), dtype=mx.int32), max(self._rows.ends)
        for buffer in self.buffers:
            buffer.keep(index, used)


def _capacity(positions: int, batch: int) -> int:
    step = STEP if batch == 1 else BATCH_STEP
    return -(-positions // step) * step


def padded(array: mx.array, capacity: int) -> mx.array:
    """Return (batch, heads, positions, width), padded with zeros to `capacity` positions."""
    more = capacity - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else array
