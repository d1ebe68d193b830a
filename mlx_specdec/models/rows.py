"""The lengths of a context's sequences, the cache positions that a pass writes, and the KV cache of
one attention layer, in buffers that are written in place. After a round, the sequences of a batch
have different lengths, but a pass has the same number of rows for all of them. Each sequence writes
after its own end, and a mask hides older entries after that end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import add
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RewindError
from ..types import Cached, Context, Reusable
from .cpu_layers import shared

DROP = 256
"""Windowed caches drop this many old entries at once, because the others are copied."""


class Place:
    """The cache positions that one pass writes.

    Attributes:
        starts: The first position that each sequence writes.
        rows: How many positions every sequence writes.
        even: Whether all sequences write the same positions.
        end: The number of positions of the longest sequence after the pass.
    """

    def __init__(self, starts: tuple[int, ...], rows: int) -> None:
        self.starts = starts
        self.rows = rows
        # Computed here once, because every layer reads them.
        longest = max(starts)
        self.even = min(starts) == longest
        self.end = longest + rows

    @cached_property
    def positions(self) -> np.ndarray:
        return np.array(self.starts, dtype=np.int32)[:, None] + np.arange(self.rows, dtype=np.int32)

    @cached_property
    def columns(self) -> mx.array:
        return mx.array(self.positions)

    # Cached for all layers, which saves 6 operations per layer in a pass over uneven rows.
    @cached_property
    def offset(self) -> int | mx.array:
        """The position of the first row: one number if it is the same for all sequences, otherwise
        (batch,) int32."""
        return self.starts[0] if self.even else shared(mx.array(self.starts))

    @cached_property
    def targets(self) -> mx.array:
        """The positions that are written, (batch, 1, rows, 1) int32, to broadcast over heads and
        width."""
        return self.columns[:, None, :, None]

    def visible(self, window: int | None = None) -> mx.array:
        """Return the causal mask, (batch, 1, rows, end) bool, which is True for at most the
        `window` newest positions of each row."""
        positions, columns = self.targets, mx.arange(self.end)
        mask = columns <= positions
        return mask if window is None else mask & (columns > positions - window)

    def causal_mask(self) -> mx.array | str | None:
        """Return the mask of a causal pass; None for single rows that see all positions."""
        if not self.even:
            return self.visible()
        return None if self.rows == 1 else "causal"


class Rows:
    """The lengths of `count` sequences, which the layers of a context share.

    Attributes:
        mask_axes: Returns the number of axes of the mask of an uneven pass. It is 5 if attention
            scores have an axis for the heads that share keys.
        ahead: For each sequence, the number of cache positions before its first token.
        final: The smallest length of each sequence that a rewind may reach.
        windows: The columns of windowed caches, by the size of the windows.
    """

    def __init__(self, count: int) -> None:
        self.mask_axes: Callable[[], int | None] = lambda: 4
        self.lengths = self.ahead = (0,) * count
        self.place = Place(self.lengths, 0)
        self.final = self.lengths
        self.windows: dict[int, Window] = {}

    def window(self, size: int) -> Window:
        """Return the columns of all windowed caches of this size."""
        return self.windows.setdefault(size, Window(self, size))

    def begin(self, lengths: tuple[int, ...]) -> None:
        self.lengths = self.final = lengths

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of cache positions that each sequence uses."""
        return tuple(map(add, self.lengths, self.ahead))

    def advance(self, tokens: mx.array, proposed: int) -> Place:
        """Begin a pass over tokens, (batch, m), and return where it writes. The last `proposed`
        tokens can be dropped later by `rewind`."""
        rows = tokens.shape[1]
        self.place = Place(self.ends, rows)
        self.lengths = tuple(length + rows for length in self.lengths)
        if proposed < rows:
            self.final = tuple(length - proposed for length in self.lengths)
        return self.place

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Keep the first `lengths` tokens. Raises RewindError if that drops final tokens."""
        for length, least, most in zip(lengths, self.final, self.lengths, strict=True):
            if not least <= length <= most:
                raise RewindError(
                    f"cannot go to {length} tokens: {most} were seen and {least} are final"
                )
        self.lengths = self.final = lengths

    def merge(self, joining: Rows) -> None:
        self.lengths += joining.lengths
        self.ahead += joining.ahead
        self.final += joining.final
        for size, window in self.windows.items():
            window.first += joining.windows[size].first

    def keep(self, rows: Sequence[int]) -> None:
        self.lengths = tuple(self.lengths[row] for row in rows)
        self.ahead = tuple(self.ahead[row] for row in rows)
        self.final = tuple(self.final[row] for row in rows)
        for window in self.windows.values():
            window.first = tuple(window.first[row] for row in rows)


class Window:
    """The columns of all windowed caches of one size in a context.

    A sequence's column 0 holds its position `first`, which grows when older entries are dropped.
    Positions that a rewind may reach still see their whole window.

    Args:
        rows: The lengths of the context's sequences.
        size: The number of positions that a token sees, itself included."""

    def __init__(self, rows: Rows, size: int) -> None:
        self.size = size
        self.first = (0,) * len(rows.lengths)
        self._rows = rows
        self._of: Place | None = None
        self._place = rows.place

    @property
    def place(self) -> Place:
        """The columns that the newest pass writes."""
        if self._of is not (place := self._rows.place):
            # Tokens before the final one are never fed again.
            needed = [
                max(0, min(start, final) - self.size + 1)
                for start, final in zip(place.starts, self._rows.final, strict=True)
            ]
            if max(n - first for n, first in zip(needed, self.first, strict=True)) >= DROP:
                self.first = tuple(needed)
            columns = [s - first for s, first in zip(place.starts, self.first, strict=True)]
            self._of, self._place = place, Place(tuple(columns), place.rows)
        return self._place

    @property
    def begin(self) -> int:
        """The first column that a row of the newest pass sees."""
        return max(0, min(self.place.starts) - self.size + 1)


class RowsContext:
    """The base class of contexts in which a rewind changes only lengths. `caches` has one cache per
    layer."""

    checkpoints = False

    def __init__(self, rows: Rows, caches: list[Any]) -> None:
        self._rows = rows
        self._caches = caches

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._rows.lengths

    def rewind(self, lengths: tuple[int, ...]) -> None:
        self._rows.rewind(lengths)

    def merge(self, joining: Context) -> None:
        assert isinstance(joining, RowsContext)
        self._rows.merge(joining._rows)
        for cache, more in zip(self._caches, joining._caches, strict=True):
            cache.merge(more)

    def keep(self, rows: Sequence[int]) -> None:
        self._rows.keep(rows)
        for cache in self._caches:
            cache.keep(rows)

    def snapshot(self, sequence: int) -> Reusable:
        row = slice(sequence, sequence + 1)

        def positions(begin: int, end: int) -> tuple[mx.array, ...]:
            return tuple(buffer.array[row, :, begin:end] for buffer in self._buffers())

        return Reusable(self.lengths[sequence], positions)

    def restore(self, cached: Sequence[Cached | None]) -> None:
        """Begin with the cached state of each sequence, before any pass."""
        if not any(cached):
            return
        self._rows.begin(tuple(0 if part is None else part.length for part in cached))
        first = 0
        for cache in self._caches:
            last = first + len(cache.buffers)
            cache.hold([None if part is None else part.arrays[first:last] for part in cached])
            first = last

    def _buffers(self) -> list[Any]:
        return [buffer for cache in self._caches for buffer in cache.buffers]


STEP = 256
"""A buffer of one sequence grows by this number of positions."""
BATCH_STEP = 64
"""A buffer of several sequences grows by this number of positions. It is smaller than STEP, because
every sequence has unused positions, which take memory and are copied when the buffer grows."""


class Buffer:
    """The keys or the values of one layer, (batch, heads, capacity, width)."""

    def __init__(self) -> None:
        self.array: mx.array | None = None

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


class KVCache:
    """One layer's keys and values, which have `parts` buffers each."""

    def __init__(self, rows: Rows, parts: int = 1) -> None:
        self._rows = rows
        self.buffers = [Buffer() for _ in range(2 * parts)]
        self._keys, self._values = self.buffers[0], self.buffers[parts]

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

    def hold(self, stored: Sequence[Sequence[mx.array] | None]) -> None:
        """Begin with the entries of each sequence, or with none of a sequence."""
        for number, buffer in enumerate(self.buffers):
            buffer.hold([None if arrays is None else arrays[number] for arrays in stored])

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
