"""Rounds of every length in turn, to measure what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..interfaces.rounds import RoundReport, is_drained
from .learned import Learned
from .length import Change
from .online import RoundCosts


class Survey:
    """DraftLength of a calibration: PLAIN_STEPS plain steps, then 1 to `most` tokens, and again.

    The first plain step of a stretch fills the pipeline, and the first round after it pays for what
    the draft has not read: neither counts.
    """

    PLAIN_STEPS = 6

    def __init__(self, most: int) -> None:
        self._turn = [*[0] * self.PLAIN_STEPS, 1, *range(1, most + 1)]
        self._ignored = (0, self.PLAIN_STEPS)
        self._place = 0
        self._costs = RoundCosts(most)
        self.changes: Sequence[Change] = ()
        self.wants_parts = False
        self.turns = 0

    def choose(self, remaining: int, rows: int = 1) -> int:
        """The next length, whatever remains."""
        return self._turn[self._place]

    def on_round(self, report: RoundReport) -> None:
        """One round of the length that was chosen; a shorter one is left out."""
        if is_drained(report):
            return
        if self._place not in self._ignored and report.size == self._turn[self._place]:
            self._costs.add(report.size, report.times.total, report.times.draft)
        self._place = (self._place + 1) % len(self._turn)
        self.turns += self._place == 0

    def learned(self) -> dict[int, Learned]:
        """What every length costs; see `RoundCosts.learned`."""
        return self._costs.learned()

    def measured(self) -> dict[int, float]:
        """Costs in plain steps by drafted length."""
        return {n: each.cost for n, each in self.learned().items() if n}

    @property
    def noise(self) -> float:
        """Relative standard error of a typical cost: how far turns lie from their medians, over the
        root of their number."""
        return median(self._costs.errors())
