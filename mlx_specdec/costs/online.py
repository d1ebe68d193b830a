"""What a round costs, learned while decoding.

Nothing is decided here. Plain Python numbers only: it runs once a round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from .learned import EARLIER_COST_WEIGHT, Known, Learned, rising, weighed
from .speedup import between

SAMPLES_KEPT = 15
INTERPOLATED_COST_WEIGHT = 1.0
OPTIMISTIC_SHARE = 0.15
"""Of the expected rise of the costs of longer drafts: what is left of it if they turn out cheap."""
LEAST_WEIGHT = 0.4
SAMPLES_FOR_SPREAD = 4
PLAIN_STEPS_FOR_COSTS = 3
ROUNDS_FOR_COSTS = 2
TYPICAL_SPREAD = 0.15
NORMAL_MEDIAN_DEVIATION = 0.6745
"""Median distance of a normal sample from the median, in standard deviations."""
UNLIKELY = 2.3
"""Standard deviations that noise explains; more is seen once in fifty times."""
CONTRADICTED = 0.25
"""A round can take longer than it costs, never so much less: earlier costs are then wrong, all."""


class _Median:
    """The median of the last few samples: one stalled round does not move it."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self.value = 0.0

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = median(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[float]:
        return iter(self._samples)

    def spread(self) -> float:
        """Standard deviation of a sample relative to the median, roughly."""
        if len(self) < SAMPLES_FOR_SPREAD or not self.value:
            return TYPICAL_SPREAD
        return (
            median(abs(sample - self.value) for sample in self._samples)
            / self.value
            / NORMAL_MEDIAN_DEVIATION
        )


class RoundCosts:
    """Seconds of a round by drafted length, 0 being a plain step; most: the longest length.

    known: costs measured earlier, in plain steps, by length; they count for as many rounds as stand
    behind them, EARLIER_COST_WEIGHT where that is not told. Of length 0 it is the seconds of a
    plain step. free: drafting itself takes no time. A length that was neither measured nor tried
    lies on the straight line through those that were.
    """

    def __init__(self, most: int, known: Known | None = None, *, free: bool = False) -> None:
        self._free = free
        learned = {
            n: each
            for n, each in weighed(known or {}).items()
            if n <= most and (n or isinstance((known or {})[n], Learned))
        }
        earlier = learned.pop(0, None)
        self._earlier_step = [earlier.cost] if earlier else []
        self._weights = {n: each.rounds for n, each in learned.items()}
        self._rounds = [_Median() for _ in range(most + 1)]
        self._draft = _Median()
        self._unit = _Median()
        self._known = rising(learned) if learned else {}
        self._earlier: dict[int, float] = {}
        self._totals: list[float] | None = None

    @property
    def tried(self) -> tuple[int, ...]:
        """Lengths that were measured earlier, or that this text has at least one round of."""
        return tuple(n for n, seen in enumerate(self._rounds) if n in self._known or len(seen))

    @property
    def any_known(self) -> bool:
        """Whether earlier texts measured any length."""
        return len(self._known) > 0

    @property
    def wants_parts(self) -> bool:
        """Whether what drafting alone takes would be news: there are no earlier costs to tell the
        price of another token, and too few rounds were timed in parts."""
        return not (self._free or self._known) and len(self._draft) < ROUNDS_FOR_COSTS

    def only_earlier(self, count: int) -> bool:
        """Whether all that is known of a length was measured earlier."""
        return count in self._known and not self.is_measured(count)

    def is_measured(self, count: int) -> bool:
        """Whether this text has had a round of a length."""
        return len(self._rounds[count]) > 0

    @property
    def in_seconds(self) -> bool:
        """Whether totals are seconds. Costs measured earlier are plain steps, until a round of such
        a length has told how long these take now."""
        return not self._known or len(self._unit) > 0

    def add(self, count: int, seconds: float, draft: float | None) -> None:
        """A round with `count` drafted tokens; draft: seconds of drafting, where timed."""
        self._rounds[count].add(seconds)
        if count in self._known:
            plain, steps = self._rounds[0].value, len(self._rounds[0])
            sure = count > 0 and steps >= PLAIN_STEPS_FOR_COSTS
            if sure and seconds < CONTRADICTED * self._known[count] * plain:
                self._known.clear()
            else:
                self._unit.add(seconds / self._known[count])
        if draft is not None and count:
            self._draft.add(draft / count)
        self._totals = None

    @property
    def plain(self) -> float:
        """Seconds of a plain step in this text, 0 before the first."""
        return self._rounds[0].value

    def totals(self) -> Sequence[float]:
        """Expected seconds for every length; plain steps if nothing was seen yet. Plain steps must
        have been seen or measured earlier."""
        if self._totals is None:
            self._totals = self._estimate()
        return self._totals

    def learned(self) -> dict[int, Learned]:
        """What this text measured, against its plain steps and its rounds of other lengths whose
        costs are known. Short texts teach one or two lengths, and many of them all."""
        _, wrong = self._scales()
        costs, known = {}, {0: 1.0} | {n: wrong * cost for n, cost in self._known.items() if n}
        earlier = self._earlier_step if self.plain_steps < PLAIN_STEPS_FOR_COSTS else []
        for n, seen in enumerate(self._rounds):
            steps = [s / known[m] for m, s in self._samples() if m != n and m in known] + earlier
            if n and len(seen) and steps:
                rounds = 1 / (1 / len(seen) + 1 / len(steps))
                costs[n] = Learned(seen.value / median(steps), rounds)
        if self.plain_steps >= PLAIN_STEPS_FOR_COSTS:
            costs[0] = Learned(self.plain, float(self.plain_steps))
        return costs

    def _samples(self) -> Iterator[tuple[int, float]]:
        return ((n, seconds) for n, seen in enumerate(self._rounds) for seconds in seen)

    def rounds_behind(self, count: int) -> float:
        """How many rounds an earlier cost stands for."""
        return self._weights.get(count, 0.0)

    @property
    def plain_steps(self) -> int:
        """How many plain steps this text has seen."""
        return len(self._rounds[0])

    @property
    def step_is_known(self) -> bool:
        """Whether any text ever measured a plain step."""
        return bool(self._earlier_step or len(self._rounds[0]))

    def errors(self) -> list[float]:
        """Relative standard error of the median of each length that was seen."""
        return [seen.spread() / math.sqrt(len(seen)) for seen in self._rounds if len(seen)]

    def doubt(self) -> Sequence[float]:
        """Relative standard error of each total, roughly; 0 for plain steps."""
        steps = self._rounds[0] if len(self._rounds[0]) >= SAMPLES_FOR_SPREAD else self._unit
        spread = steps.spread()
        errors = [0.0]
        for count, seen in enumerate(self._rounds[1:], start=1):
            weight = len(seen) + (self._weights.get(count, 0.0) if count in self._known else 0.0)
            errors.append(spread / math.sqrt(max(LEAST_WEIGHT, weight)))
        return errors

    def hopeful(self) -> Sequence[float]:
        """The totals, with lengths beyond all that were tried on the cheap side: as if more rows in
        the target's pass were nearly free."""
        totals, longest, draft = self.totals(), self.tried[-1], self._draft_step()
        flat = [totals[longest] + more * draft for more in range(len(totals) - longest)]
        beyond = [
            f + OPTIMISTIC_SHARE * (t - f) for f, t in zip(flat, totals[longest:], strict=True)
        ]
        return [*totals[:longest], *beyond]

    def _draft_step(self) -> float:
        """What another drafted token takes in drafting: as timed, or else no more than it ever
        added to an earlier cost."""
        if self._free or len(self._draft) or not self._known:
            return self._draft.value
        rises = (
            (self._earlier[more] - self._earlier[fewer]) / (more - fewer)
            for fewer, more in pairwise(sorted(self._earlier))
        )
        return max(0.0, min(rises, default=0.0))

    def _scales(self) -> tuple[float, float]:
        """Seconds that a plain step of earlier costs stands for, and by what factor those of drafts
        are wrong: where noise does not explain what this text's rounds took, all are."""
        seen = {n: self._rounds[n] for n in self._known if n and len(self._rounds[n])}
        rounds, steps = sum(map(len, seen.values())), self._rounds[0]
        if not rounds or len(steps) < PLAIN_STEPS_FOR_COSTS:
            return self._unit.value or 1.0, 1.0
        off = sum(len(s) * math.log(s.value / self._known[n]) for n, s in seen.items()) / rounds
        off -= math.log(steps.value)
        noise = max(TYPICAL_SPREAD, steps.spread()) * math.sqrt(1 / len(steps) + 1 / rounds)
        if abs(off) < UNLIKELY * noise:
            return self._unit.value, 1.0
        return steps.value, math.exp(off)

    def _estimate(self) -> list[float]:
        unit, wrong = self._scales()
        self._earlier = {n: cost * unit * (wrong if n else 1.0) for n, cost in self._known.items()}
        totals: list[float] = []
        tried = self.tried
        for count, seen in enumerate(self._rounds):
            if count in self._known:
                line = self._earlier[count]
                weight = self._weights.get(count, EARLIER_COST_WEIGHT)
            elif count == 0:
                line, weight = seen.value, INTERPOLATED_COST_WEIGHT
            else:
                line, weight = self._line(totals, tried, count), INTERPOLATED_COST_WEIGHT
            # One unlucky sample must not rule a length out for good.
            totals.append((len(seen) * seen.value + weight * line) / (len(seen) + weight))
        return totals

    def _line(self, totals: Sequence[float], tried: Sequence[int], count: int) -> float:
        below = max(known for known in tried if known < count)
        above = next((known for known in tried if known > count), None)
        start = totals[below]
        if above is None:
            slope = (start - totals[0]) / below if below else 0.0
            return start + (count - below) * max(slope, self._draft_step())
        end = self._earlier.get(above, self._rounds[above].value)
        return between({below: start, above: end}, count)
