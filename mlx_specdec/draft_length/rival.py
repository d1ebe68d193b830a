"""How many tokens one of several sources may draft, of which one at a time is asked."""

from __future__ import annotations

from typing import Any

from ..interfaces.rounds import RoundReport
from .auto_length import AutoLength

STANDS_BY = 64
"""Rounds of another source after which one is tried again, or the first of a text."""


class Rival(AutoLength):
    """AutoLength of one of several sources."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._stood_by = STANDS_BY

    @property
    def speed(self) -> float:
        """What is promised over plain decoding."""
        return self._choice.speed

    @property
    def begins(self) -> bool:
        """Whether the next round is the first one of all, or belongs to a trial."""
        return self._next > 0 and (self._trying or self._repeat > 0 or self._costs.tried == (0,))

    def stand_by(self, seconds: float) -> None:
        """Another source had a round, of so many seconds."""
        self._budget.earn(seconds)
        self._unread.skip()
        self._stood_by += 1

    def challenge(self, other: Rival) -> bool:
        """Whether the budget pays for a round in the place of the other source's, once a text and
        then once in STANDS_BY of its rounds; the next round is then a trial."""
        plain, length = other.plain, self._choice.length or min(self.FIRST_DRAFT, self._most)
        if not (plain and self._begun) or self._stood_by < STANDS_BY:
            return False
        totals, price = self._costs.totals(), plain / other.speed
        costs = [plain * total / totals[0] for total in totals]
        if self._loss(length, costs, self._acceptance.emitted(), price) > self._budget.left(plain):
            return False
        if not self._costs.plain_steps:
            # The other one's knowledge is as good as some steps of this text.
            for _ in range(self.PLAIN_STEPS_FIRST):
                self._costs.add(0, plain, None)
        self._next, self._price, self._trying = length, price, True
        return True

    def on_round(self, report: RoundReport) -> None:
        """As AutoLength has it."""
        super().on_round(report)
        if report.size:
            self._stood_by = 0
