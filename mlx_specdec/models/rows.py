"""How many positions each sequence of a context has, and where a pass writes the next ones. After a
round every sequence of a batch has another length. A pass is a rectangle all the same: each
sequence writes behind its length, and a mask hides what lies there from earlier passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import add
from typing import Any

import mlx.core as mx
import numpy as np

from ..interfaces import Context
from ..interfaces.results import Cached, KVSlice, Reusable
from .base import check_pass, check_rewind
from .cpu_layers import shared


class Place:
    """Where one pass writes: `rows` positions behind `starts`, one entry per sequence. even: all
    write the same columns. end: how many columns are in use afterwards."""

    def __init__(self, starts: tuple[int, ...], rows: int) -> None:
        self.starts = starts
        self.rows = rows
        # Every layer reads these.
        longest = max(starts)
        self.even = min(starts) == longest
        self.end = longest + rows

    @cached_property
    def positions(self) -> np.ndarray:
        return np.array(self.starts, dtype=np.int32)[:, None] + np.arange(self.rows, dtype=np.int32)

    @cached_property
    def columns(self) -> mx.array:
        return mx.array(self.positions)

    # Made once for all layers: 6 operations fewer in each layer of a pass over uneven rows.
    @cached_property
    def offsets(self) -> mx.array:
        """(batch,) int32, the position of the first row of each sequence."""
        return shared(mx.array(self.starts))

    @cached_property
    def targets(self) -> mx.array:
        """(batch, 1, rows, 1) int32, the columns that are written, for every head and width."""
        return self.columns[:, None, :, None]

    def visible(self, window: int | None = None) -> mx.array:
        """(batch, 1, rows, end) bool: what each position sees, at most its `window` newest."""
        positions, columns = self.targets, mx.arange(self.end)
        mask = columns <= positions
        return mask if window is None else mask & (columns > positions - window)


class Rows:
    """The lengths of `count` sequences, which the layers of a context share. mask_axes: of an
    uneven pass's mask; 5 where scores have an axis for heads that share their keys. ahead: how many
    columns each has before its first token."""

    def __init__(self, count: int, mask_axes: int = 4) -> None:
        self.mask_axes = mask_axes
        self.lengths = self.ahead = (0,) * count
        self.place = Place(self.lengths, 0)
        self._final = self.lengths

    def begin(self, lengths: tuple[int, ...]) -> None:
        self.lengths = self._final = lengths

    @property
    def ends(self) -> tuple[int, ...]:
        """The columns in use by each sequence."""
        return tuple(map(add, self.lengths, self.ahead))

    def advance(self, tokens: mx.array, proposed: int) -> Place:
        """Begin a pass over `tokens`, (batch, m). Raises ValueError as `check_pass` does."""
        rows = check_pass(tokens, proposed, len(self.lengths))
        self.place = Place(self.ends, rows)
        self.lengths = tuple(length + rows for length in self.lengths)
        if proposed < rows:
            self._final = tuple(length - proposed for length in self.lengths)
        return self.place

    def rewind(self, lengths: tuple[int, ...]) -> None:
        check_rewind(lengths, self._final, self.lengths)
        self.lengths = self._final = lengths

    def join(self, other: Rows) -> None:
        self.lengths += other.lengths
        self.ahead += other.ahead
        self._final += other._final

    def filter(self, keep: Sequence[int]) -> None:
        self.lengths = tuple(self.lengths[row] for row in keep)
        self.ahead = tuple(self.ahead[row] for row in keep)
        self._final = tuple(self._final[row] for row in keep)


class RowsContext:
    """What contexts share whose rewinds change nothing but lengths. caches: one a layer."""

    replays = False
    checkpoints = False

    def __init__(self, rows: Rows, caches: list[Any]) -> None:
        self._rows = rows
        self._caches = caches

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._rows.lengths

    def rewind(self, lengths: tuple[int, ...]) -> int:
        self._rows.rewind(lengths)
        return 0

    def join(self, other: Context) -> None:
        assert isinstance(other, RowsContext)
        self._rows.join(other._rows)
        for cache, its in zip(self._caches, other._caches, strict=True):
            cache.join(its)

    def filter(self, keep: Sequence[int]) -> None:
        self._rows.filter(keep)
        for cache in self._caches:
            cache.filter(keep)

    def reusable(self, sequence: int) -> Reusable:
        row = slice(sequence, sequence + 1)

        def columns(begin: int, end: int) -> tuple[mx.array, ...]:
            return tuple(buffer.array[row, :, begin:end] for buffer in self._buffers())

        return Reusable(self.lengths[sequence], columns)

    def recall(self, cached: Sequence[Cached | None]) -> None:
        known = [each if isinstance(each, KVSlice) else None for each in cached]
        if not any(known):
            return
        self._rows.begin(tuple(0 if each is None else each.length for each in known))
        for place, buffer in enumerate(self._buffers()):
            buffer.hold([None if each is None else each.arrays[place] for each in known])

    def _buffers(self) -> list[Any]:
        return [buffer for cache in self._caches for buffer in cache.buffers]
