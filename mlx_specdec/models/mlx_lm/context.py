"""Contexts of mlx-lm's models.

A rewind drops the newest entries of a KV cache. A recurrent state has no such entries: it sums up
all tokens. So the context copies recurrent states, and any other caches of mlx-lm that cannot drop
entries, before each pass with draft tokens. A rewind restores the copies and repeats the recurrence
over the accepted tokens; see recurrence.py. Copies are made by `copy.deepcopy`, and share memory
with a cache until one of the two is written to."""

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from ...errors import RewindError
from ...types import Cached, Context, Reusable, Scores
from ..rows import Rows, RowsContext
from .caches import BatchedCache, MakeCache
from .network import CapturingNetwork
from .recurrence import RecordedCall, Recurrences


class DecoderOnlyContext(RowsContext):
    """A types.Context of `count` sequences.

    Attributes:
        entries: The list of caches that the model gets. A rewind may replace its elements.
        rows: The lengths of the sequences.
        attention: The KV caches in `entries`.
        restores: Whether a rewind can reach a part of a pass.

    Args:
        make: For each entry of the list that the model gets, the function that makes it.
        count: Number of sequences. It is 1 if a cache is none of `caches.py` and no ArraysCache.
        recurrences: Repeats the calls that write the caches without entries to drop; None if these
            calls are not recorded."""

    def __init__(
        self,
        model: CapturingNetwork,
        make: Sequence[MakeCache],
        count: int,
        recurrences: Recurrences | None = None,
    ) -> None:
        self.rows = Rows(count)
        self.entries = [make_cache(self.rows) for make_cache in make]
        places = _slots(self.entries)
        self.attention = [h[at] for h, at in places if isinstance(h[at], BatchedCache)]
        super().__init__(self.rows, self.attention)
        self._model, self._recurrences = model, recurrences
        self._slots = [(h, at) for h, at in places if not isinstance(h[at], BatchedCache)]
        self._boundaries: list[_Boundary] = []
        self.restores = not self._slots or recurrences is not None
        self.checkpoints = bool(self._slots or self.rows.windows)

    @property
    def states(self) -> list[Any]:
        """The caches that cannot drop entries."""
        return [holder[index] for holder, index in self._slots]

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        for name in hidden:
            self._model.capture(name)  # raises OptionError before the caches change
        starts, rows = self.lengths, tokens.shape[1]
        self.rows.advance(tokens, proposed)
        if proposed < rows:
            self._boundaries.clear()
        if not (proposed and self._slots):
            return self._model.run(tokens, self.entries, hidden)
        # Copy all at once, so that objects that caches share are shared by the copies too.
        copies, passed = copy.deepcopy(self.states), self.states
        recorded: AbstractContextManager[list[RecordedCall]] = nullcontext([])
        if rows > 1 and self._recurrences is not None:
            recorded = self._recurrences.recorded()
        with recorded as calls:
            scores = self._model.run(tokens, self.entries, hidden)
        self._boundaries.append(_Boundary(starts, copies, passed, rows, calls))
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> None:
        now = self.lengths
        super().rewind(lengths)
        self.rewind_states(lengths, now)
        if self._slots:
            # The device computes the state while the host builds the next proposal.
            mx.async_eval([cache.state for cache in self.states])

    def rewind_states(self, lengths: tuple[int, ...], now: tuple[int, ...]) -> None:
        """Restore the state of each sequence after `lengths` tokens, without computing it.

        Args:
            lengths: At most `now`, for each sequence.
            now: The lengths of the sequences.
        Raises:
            RewindError: If no copy reaches a length. The caches are then unchanged."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (length, current) in enumerate(zip(lengths, now, strict=True)):
            groups.setdefault(self._source(row, length, current), []).append(row)
        if self._slots and set(groups) != {(-1, 0)}:
            parts = [self._part(*source, rows, len(now)) for source, rows in groups.items()]
            self._hold(merged(parts, list(groups.values())))
        self._boundaries.clear()

    def _source(self, row: int, length: int, current: int) -> tuple[int, int]:
        """Return the number of the boundary from which a sequence reaches a length, and how many
        rows are repeated. The number is -1 for the caches themselves."""
        if length == current or not self._slots:
            return -1, 0
        for number, boundary in reversed(list(enumerate(self._boundaries))):
            more = length - boundary.starts[row]
            if more == 0 or (boundary.calls and 0 < more < boundary.rows):
                return number, more
        raise RewindError(f"cannot go back to {length} tokens: no copy was kept that far back")

    def _part(self, number: int, repeated: int, rows: list[int], count: int) -> list[Any]:
        """Return caches of some of the `count` sequences, from the source that `_source` names."""
        boundary, index = self._boundaries[number], None
        caches = self.states if number < 0 else boundary.copies
        if len(rows) < count:
            index, caches = mx.array(rows), [copy.copy(cache) for cache in caches]
            for cache in caches:
                cache.filter(index)
        if repeated and self._recurrences is not None:
            written = {id(old): new for old, new in zip(boundary.passed, caches, strict=True)}
            shape = count, boundary.rows
            self._recurrences.repeat(boundary.calls, shape, index, repeated, written)
        return caches

    def _hold(self, states: Sequence[Any]) -> None:
        for (holder, index), cache in zip(self._slots, states, strict=True):
            holder[index] = cache

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in (*self.attention, *self.states)])
        mx.clear_cache()

    def merge(self, other: Context) -> None:
        assert isinstance(other, DecoderOnlyContext)
        self._boundaries.clear()
        if self._slots:
            first, second = len(self.lengths), len(other.lengths)
            rows = [list(range(first)), list(range(first, first + second))]
            self._hold(merged([self.states, other.states], rows))
        super().merge(other)

    def keep(self, rows: Sequence[int]) -> None:
        self._boundaries.clear()
        for cache in self.states:
            if isinstance(cache, ArraysCache):
                cache.filter(mx.array(list(rows)))
        super().keep(rows)

    def snapshot(self, sequence: int) -> Reusable:
        if not self.checkpoints:
            return super().snapshot(sequence)
        length = self.lengths[sequence]
        if not length or length != self.rows.final[sequence]:
            return Reusable()
        # Views are copied lazily, so that a snapshot does not keep larger arrays in memory.
        arrays = [array for cache in self.attention for array in cache.stored(sequence)]

        def placed(array: mx.array) -> dict[str, int]:
            arrays.append(array[sequence : sequence + 1] if array.ndim else array)
            return {"array": len(arrays) - 1}

        # JSON refers to arrays by number.
        states = json.dumps([cache.state for cache in self.states], default=placed)
        owned = tuple(map(mx.contiguous, arrays))
        snapshot = Cached(length, owned, is_snapshot=True, description=states)
        return Reusable(snapshot=snapshot)

    def restore(self, cached: Sequence[Cached | None]) -> None:
        super().restore(cached)
        if any(cached) and self._slots:
            parts = [_filled(self.states, part) for part in cached]
            self._hold(merged(parts, [[row] for row in range(len(cached))]))


def _filled(empty: list[Any], cached: Cached | None) -> list[Any]:
    """Return copies of empty caches, with the state of a snapshot."""
    caches = copy.deepcopy(empty)
    if cached is not None and cached.description is not None:
        arrays = copy.deepcopy(cached.arrays)  # because caches write into their arrays
        states = json.loads(cached.description, object_hook=lambda place: arrays[place["array"]])
        for cache, state in zip(caches, states, strict=True):
            cache.state = state
    return caches


@dataclass(frozen=True)
class _Boundary:
    """The state from before a pass.

    Attributes:
        starts: The length of each sequence.
        copies: Copies of the caches.
        passed: The caches that the pass has written.
        rows: The number of rows of the pass.
        calls: The recorded calls of the pass; empty if it was not recorded."""

    starts: tuple[int, ...]
    copies: list[Any]
    passed: list[Any]
    rows: int
    calls: list[RecordedCall]


def merged(parts: Sequence[list[Any]], rows: Sequence[list[int]]) -> list[Any]:
    """Return caches of all sequences from the caches of groups of sequences, which change. rows:
    The numbers of each group's sequences."""
    if len(parts) == 1:
        return parts[0]
    order = [row for group in rows for row in group]
    for caches, group in zip(parts, rows, strict=True):
        for cache in caches:
            # An empty cache has no other sign of its size. `extend` fills it with zeros, which
            # `trials` has found to be equal.
            cache.left_padding = mx.zeros(len(group), mx.int32)
    for cache, *others in zip(*parts, strict=True):
        for other in others:
            cache.extend(other)
        cache.finalize()
        if order != sorted(order):
            cache.filter(mx.array([order.index(row) for row in range(len(order))]))
    return parts[0]


def _slots(holder: list[Any]) -> list[tuple[list[Any], int]]:
    """Return the place of each cache in a list, including those inside of a CacheList: the list
    that holds the cache, through which models reach it, and the index in this list."""
    places: list[tuple[list[Any], int]] = []
    for index, cache in enumerate(holder):
        if type(cache) is CacheList:
            # mlx-lm uses a tuple, whose elements cannot be replaced. A list comes from an earlier
            # call, whose places refer to it.
            if not isinstance(cache.caches, list):
                cache.caches = list(cache.caches)
            places += _slots(cache.caches)
        else:
            places.append((holder, index))
    return places
