"""Contexts of mlx-lm's models."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...types import Cached, Context, Reusable, Scores
from ..rows import Rows, RowsContext
from .caches import BatchedCache, MakeCache, leaves
from .network import CapturingNetwork
from .recurrence import Recurrences
from .states import States, merged


class DecoderOnlyContext(RowsContext):
    """A types.Context of `count` sequences.

    Attributes:
        entries: The list of caches that the model gets.
        rows: The lengths of the sequences.
        attention: The KV caches in `entries`.
        states: The other caches in `entries`.

    Args:
        make: For each entry of the list that the model gets, the function that makes it.
        count: Number of sequences. It is 1 if a cache is none of `caches.py` and no ArraysCache.
        mask_axes: Returns the number of axes of masks; see `rows.Rows`.
        recurrences: See `states.States`."""

    def __init__(
        self,
        model: CapturingNetwork,
        make: Sequence[MakeCache],
        count: int,
        mask_axes: Callable[[], int | None] = lambda: 4,
        recurrences: Recurrences | None = None,
    ) -> None:
        self.rows = Rows(count, mask_axes)
        self.entries = [make_cache(self.rows) for make_cache in make]
        self.attention = [
            cache for cache in leaves(self.entries) if isinstance(cache, BatchedCache)
        ]
        super().__init__(self.rows, self.attention)
        self._model = model
        self.states = States(self.entries, recurrences)
        self.checkpoints = bool(self.states or self.rows.windows)

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        for name in hidden:
            self._model.capture(name)  # raises OptionError before the caches change
        starts = self.lengths
        self.rows.advance(tokens, proposed)
        with self.states.in_pass(starts, tokens.shape[1], proposed):
            return self._model.run(tokens, self.entries, hidden)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Rewind as types.Context says, without a target pass."""
        now = self.lengths
        super().rewind(lengths)
        self.states.rewind(lengths, now)
        if self.states:
            # The device computes the state while the host builds the next proposal.
            mx.async_eval([cache.state for cache in self.states.caches])

    @property
    def nbytes(self) -> int:
        """The bytes of all caches."""
        return sum(int(cache.nbytes) for cache in (*self.attention, *self.states.caches))

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in (*self.attention, *self.states.caches)])
        mx.clear_cache()

    def merge(self, other: Context) -> None:
        assert isinstance(other, DecoderOnlyContext)
        self.states.merge(other.states, (len(self.lengths), len(other.lengths)))
        super().merge(other)

    def keep(self, rows: Sequence[int]) -> None:
        self.states.keep(rows)
        super().keep(rows)

    def snapshot(self, sequence: int) -> Reusable:
        if not self.checkpoints:
            return super().snapshot(sequence)
        length = self.lengths[sequence]
        if not length or length != self.rows.final[sequence]:
            return Reusable()
        # Views are copied lazily, so that a snapshot does not keep larger arrays in memory.
        arrays = [array for cache in self.attention for array in cache.stored(sequence)]
        states = [_encoded(cache.state, sequence, arrays) for cache in self.states.caches]
        owned = tuple(map(mx.contiguous, arrays))
        snapshot = Cached(length, owned, is_snapshot=True, description=json.dumps(states))
        return Reusable(snapshot=snapshot)

    def restore(self, cached: Sequence[Cached | None]) -> None:
        """Begin with the cached state of each sequence, before any pass."""
        if not any(cached):
            return
        self.rows.begin(tuple(0 if part is None else part.length for part in cached))
        first = 0
        for cache in self.attention:
            last = first + len(cache.buffers)
            cache.hold([None if part is None else part.arrays[first:last] for part in cached])
            first = last
        if self.states:
            parts = [copy.deepcopy(self.states.caches) for _ in cached]
            for caches, part in zip(parts, cached, strict=True):
                if part is not None and part.description is not None:
                    for cache, state in zip(caches, json.loads(part.description), strict=True):
                        cache.state = _decoded(state, part.arrays)
            self.states.hold(merged(parts, [[row] for row in range(len(cached))]))


def _encoded(part: Any, sequence: int, arrays: list[mx.array]) -> Any:
    """Return a part of a cache's state as JSON. Add a sequence's rows of the arrays to `arrays`, to
    which the JSON refers by number."""
    if isinstance(part, mx.array):
        arrays.append(part if part.ndim == 0 else part[sequence : sequence + 1])
        return {"array": len(arrays) - 1}
    if isinstance(part, (list, tuple)):
        items = [_encoded(item, sequence, arrays) for item in part]
        return {"tuple": items} if isinstance(part, tuple) else items
    return part


def _decoded(part: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(part, dict):
        if "array" in part:
            # Caches write into their arrays.
            return copy.deepcopy(arrays[part["array"]])
        return tuple(_decoded(item, arrays) for item in part["tuple"])
    return [_decoded(item, arrays) for item in part] if isinstance(part, list) else part
