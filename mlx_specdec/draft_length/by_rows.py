"""How many tokens to draft in batches: one controller for each size of batch.

Batching and drafting spend the same spare arithmetic, so what pays for one sequence need not pay
for sixteen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from ..interfaces.rounds import RoundReport
from .by_source import LengthsBySource
from .length import Change, DraftLength


class LengthsByRows:
    """DraftLength for batches, whose sizes are rounded up to powers of two.

    make: makes the controller of such a size, when there first is a batch of it.
    """

    def __init__(self, make: Callable[[int], DraftLength]) -> None:
        self._make = make
        self._lengths: dict[int, DraftLength] = {}
        self._current = self._of(1)

    @property
    def changes(self) -> Sequence[Change]:
        """What each of them chose; rounds are its own."""
        return tuple(chain.from_iterable(each.changes for each in self._lengths.values()))

    @property
    def wants_parts(self) -> bool:
        """What the controller of the last size wants."""
        return self._current.wants_parts

    @property
    def by_rows(self) -> dict[int, DraftLength]:
        """The controllers that there are, by size of batch."""
        return dict(self._lengths)

    def choose(self, remaining: int, rows: int = 1) -> int:
        """What the controller of this size chooses."""
        self._current = self._of(rows)
        return self._current.choose(remaining, rows)

    def limit(self, name: str, most: int) -> int:
        """As LengthsBySource.limit says, for the size that `choose` was last asked about."""
        current = self._current
        return current.limit(name, most) if isinstance(current, LengthsBySource) else most

    def on_round(self, report: RoundReport) -> None:
        """A round is its size's."""
        self._of(len(report.sequences)).on_round(report)

    def _of(self, rows: int) -> DraftLength:
        size = 1 << (rows - 1).bit_length()
        if size not in self._lengths:
            self._lengths[size] = self._make(size)
        return self._lengths[size]
