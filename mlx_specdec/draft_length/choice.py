"""The draft length that is in use, and what another one must promise to take its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .length import Change
from .speedup import rates


class Choice:
    """length: 0 at first, which is plain decoding. speed: what it promises, over plain decoding.
    changes: which was chosen in which round, the newest KEPT of them."""

    KEPT = 1000
    WORTH_CHANGING = 1.04
    WORTH_DRAFTING_TOGETHER = 1.1
    """Sequences that draft end apart, and their places stay empty until others join."""

    def __init__(self) -> None:
        self.length = 0
        self.speed = 1.0
        self.changes: deque[Change] = deque(maxlen=self.KEPT)

    def best(
        self,
        tokens: Sequence[float],
        costs: Sequence[float],
        among: Sequence[int],
        *,
        rounds: int,
        rows: int,
        doubt: float,
    ) -> int:
        """The length that promises most from now on; the current one, where that is hardly more.

        tokens, costs: of a round, by drafted length. among: lengths. rounds: so far. rows:
        sequences of the batch. doubt: tokens that a round of drafts may bring beyond these; while
        they would make drafting pay, it is not given up.
        """
        speeds = rates(tokens, costs)
        drafting = max(among, key=lambda length: speeds[length] if length else 0.0)
        bar = self._bar(rows) / (1 + doubt / tokens[drafting])
        promises = [bar * speeds[0], *speeds[1:]]
        best = max(among, key=promises.__getitem__)
        if best == 0 or speeds[best] > self.WORTH_CHANGING * speeds[self.length]:
            if best != self.length or not self.changes:
                self.changes.append(Change(rounds, best, speeds[best] / speeds[0]))
            self.length = best
        self.speed = speeds[self.length] / speeds[0]
        return self.length

    def worth_trying(self, rows: int) -> float:
        """What a length must promise over the current one, if its costs were kind."""
        return self.WORTH_CHANGING if self.length else max(self.WORTH_CHANGING, self._bar(rows))

    def _bar(self, rows: int) -> float:
        """What drafting must promise over plain steps."""
        return 1.0 if rows == 1 else self.WORTH_DRAFTING_TOGETHER
