"""What a round costs and what it brings, learned while decoding.

Knows seconds and counts of rounds by their drafted length. Knows no clock and no model, and decides
nothing. Plain Python numbers only: it runs once a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

KEPT = 9
OUTWARD = 0.3
PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 2.0
POOLED_WEIGHT = 4.0


class _Median:
    """The lower median of the last few samples: one stalled round does not move it."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)
        self.value = 0.0

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = sorted(self._samples)[(len(self._samples) - 1) // 2]

    def __len__(self) -> int:
        return len(self._samples)


class RoundCosts:
    """Seconds of a round by drafted length, 0 being a plain step; most: the longest length.

    A length that was never tried is estimated from its neighbours, on the cheap side: halfway
    between a target pass whose price does not rise and the straight line, and OUTWARD of the way
    beyond the longest length tried. What looks good is then tried, and known.
    """

    def __init__(self, most: int) -> None:
        self._rounds = [_Median() for _ in range(most + 1)]
        self._draft = _Median()
        self._totals: list[float] | None = None

    @property
    def tried(self) -> tuple[int, ...]:
        """Lengths with at least one sample."""
        return tuple(count for count, samples in enumerate(self._rounds) if len(samples))

    def add(self, count: int, seconds: float, draft: float | None) -> None:
        """A round with `count` drafted tokens; draft: seconds of drafting, where timed."""
        self._rounds[count].add(seconds)
        if draft is not None and count:
            self._draft.add(draft / count)
        self._totals = None

    def totals(self) -> Sequence[float]:
        """Expected seconds for every length; plain steps must have been seen."""
        if self._totals is None:
            self._totals = self._estimate()
        return self._totals

    def _estimate(self) -> list[float]:
        step = self._draft.value
        tried = self.tried
        totals: list[float] = []
        for count, samples in enumerate(self._rounds):
            if count == 0:
                totals.append(samples.value)
                continue
            below = max(known for known in tried if known < count)
            cheap = self._rounds[below].value + (count - below) * step
            above = next((known for known in tried if known > count), None)
            if above is not None:
                share = (count - below) / (above - below)
                low, high = self._rounds[below].value, self._rounds[above].value
                cheap = (cheap + low + share * (high - low)) / 2
            elif below:
                slope = (self._rounds[below].value - totals[0]) / below
                cheap += OUTWARD * (count - below) * max(0.0, slope - step)
            seen = len(samples)
            # One unlucky sample must not rule a length out for good.
            totals.append((seen * samples.value + cheap) / (seen + 1) if seen else cheap)
        return totals


class Acceptance:
    """How likely the first i drafted tokens are all accepted; old rounds are slowly forgotten.

    memory: rounds after which a round's weight has fallen to 1/e.
    """

    def __init__(self, most: int, memory: float = 60.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._reached = [0.0] * most
        self._passed = [0.0] * most

    def add(self, drafted: int, accepted: int) -> None:
        """A round's verdict. Positions behind the first rejection say nothing."""
        looked_at = min(drafted, accepted + 1)
        for index in range(len(self._reached)):
            self._reached[index] *= self._decay
            self._passed[index] *= self._decay
        for index in range(looked_at):
            self._reached[index] += 1.0
            self._passed[index] += index < accepted

    def emitted(self) -> list[float]:
        """Expected tokens of a round for every length, the target's own token included."""
        pooled = (sum(self._passed) + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (
            sum(self._reached) + PRIOR_WEIGHT
        )
        emitted, all_of_them = [1.0], 1.0
        for reached, passed in zip(self._reached, self._passed, strict=True):
            all_of_them *= (passed + POOLED_WEIGHT * pooled) / (reached + POOLED_WEIGHT)
            emitted.append(emitted[-1] + all_of_them)
        return emitted
