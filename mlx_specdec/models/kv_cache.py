"""Keys and values of one attention layer, in buffers that are written in place."""

from __future__ import annotations

import mlx.core as mx

STEP = 256


class KVCache:
    """Preallocated (1, heads, capacity, width) buffers; capacity grows by STEP positions."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def state(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return [each for each in (self._keys, self._values) if each is not None]

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add (1, heads, m, width) keys and values; returns all up to the new length."""
        start, end = self.length, self.length + keys.shape[2]
        self._keys = _with_room(self._keys, keys, end)
        self._values = _with_room(self._values, values, end)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def rewind(self, length: int) -> None:
        """Keep the first `length` positions; the rest is overwritten by what comes next."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} positions cannot keep {length}")
        self.length = length


def _with_room(buffer: mx.array | None, like: mx.array, end: int) -> mx.array:
    capacity = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and end <= capacity:
        return buffer
    batch, heads, _, width = like.shape
    more = -(-(end - capacity) // STEP) * STEP
    empty = mx.zeros((batch, heads, more, width), dtype=like.dtype)
    return empty if buffer is None else mx.concatenate([buffer, empty], axis=2)
