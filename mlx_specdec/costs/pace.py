"""How fast the machine is just now: it gets slower and faster, for rounds of all lengths alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

ROUNDS = 7
"""So many tell the pace: their median forgets a stalled round, and follows a change soon."""
OTHERS = 2
"""Of these, with another length than one's own, that one can be held against."""
EXPLAINED = 0.5
"""By so many standard deviations of a round noise alone moves the median of ROUNDS."""


class Pace:
    """seen: seconds of the last rounds over those of like ones when the text began. now: the same,
    but 1 while noise may explain what is seen.

    A length that is used for long cannot be told from a machine that has become slower: once that
    is the case, its rounds tell its cost only while rounds of other lengths are recent.
    """

    def __init__(self) -> None:
        self.seen = self.now = 1.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=ROUNDS)

    def compares(self, count: int) -> bool:
        """Whether a round of so many drafted tokens would tell what that length costs."""
        others = sum(n != count for n, _ in self._recent)
        return self.now == 1.0 or others >= OTHERS

    def add(self, count: int, seconds: float, costs: Sequence[float], noise: float) -> None:
        """A round of a length whose cost is known. costs: by drafted length, as when the text
        began. noise: relative standard deviation of a round."""
        self._recent.append((count, seconds))
        if len(self._recent) > ROUNDS // 2:
            self.seen = median(seconds / costs[count] for count, seconds in self._recent)
            self.now = self.seen if abs(math.log(self.seen)) > EXPLAINED * noise else 1.0
