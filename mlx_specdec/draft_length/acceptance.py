"""How many drafted tokens stay, learned while decoding.

Plain Python numbers only: it runs once a round.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

from .speedup import emitted

PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 3.0
POOLED_WEIGHT = 4.0
DRAFTS_TO_DECIDE = 12.0
"""Drafts behind a judgement; half of them where not one token was accepted."""
DRAFTS_TO_SETTLE = 90.0
EARLIER_ROUNDS = 12.0
"""How many rounds of this text the verdicts of earlier texts count for, at most."""

Verdicts = tuple[tuple[float, ...], tuple[float, ...]]
"""By position of a draft: how many tokens were verified, and how many of these accepted."""


class Acceptance:
    """How likely the first i drafted tokens are all accepted; old rounds are slowly forgotten.

    memory: rounds after which a round's weight has fallen to 1/e. earlier: verdicts of earlier
    texts, which count for at most EARLIER_ROUNDS together: a text that behaves otherwise is
    believed soon.
    """

    def __init__(self, most: int, memory: float = 60.0, earlier: Verdicts | None = None) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._reached = [0.0] * most
        self._passed = [0.0] * most
        self._own = ([0.0] * most, [0.0] * most)
        self._drafts, self._kept = (total[0] if total else 0.0 for total in earlier or ((), ()))
        if earlier is not None and earlier[0] and earlier[0][0] > 0:
            share = min(1.0, EARLIER_ROUNDS / earlier[0][0])
            for index, (reached, passed) in enumerate(zip(*earlier, strict=True)):
                if index < most:
                    self._reached[index] = share * reached
                    self._passed[index] = share * passed

    @property
    def verdicts(self) -> Verdicts:
        """What was added, all of it at full weight."""
        reached, passed = self._own
        return tuple(reached), tuple(passed)

    def add(self, verdicts: Sequence[tuple[int, int]]) -> None:
        """A round: tokens drafted and accepted, per sequence. Positions behind the first rejection
        say nothing."""
        for index in range(len(self._reached)):
            self._reached[index] *= self._decay
            self._passed[index] *= self._decay
        self._drafts += len(verdicts)
        self._kept += sum(accepted > 0 for _, accepted in verdicts)
        for drafted, accepted in verdicts:
            for index in range(min(drafted, accepted + 1, len(self._reached))):
                self._reached[index] += 1.0
                self._passed[index] += index < accepted
                self._own[0][index] += 1.0
                self._own[1][index] += index < accepted

    @property
    def settled(self) -> float:
        """How much of what drafts can teach is known: 0 up to DRAFTS_TO_SETTLE of them, 1 where
        there are twice as many."""
        return min(1.0, max(0.0, self._drafts / DRAFTS_TO_SETTLE - 1))

    @property
    def undecided(self) -> bool:
        """Whether chance may have rejected what was drafted so far, earlier texts included."""
        return self._drafts < (DRAFTS_TO_DECIDE if self._kept else DRAFTS_TO_DECIDE / 2)

    @property
    def doubt(self) -> float:
        """By how much the probability that a first token is accepted may be higher than it seems:
        two standard errors."""
        drafts = PRIOR_WEIGHT + self._drafts
        seems = (PRIOR_WEIGHT * PRIOR_ACCEPTANCE + self._kept) / drafts
        return 2 * math.sqrt(seems * (1 - seems) / drafts)

    def emitted(self) -> list[float]:
        """Expected tokens of a round for every length, the target's own token included."""
        pooled = (sum(self._passed) + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (
            sum(self._reached) + PRIOR_WEIGHT
        )
        each = (
            (passed + POOLED_WEIGHT * pooled) / (reached + POOLED_WEIGHT)
            for reached, passed in zip(self._reached, self._passed, strict=True)
        )
        return emitted(list(accumulate(each, operator.mul)))
