"""How fast the machine is just now: it gets slower and faster, for rounds of all lengths alike."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from .learned import EARLIER_COST_WEIGHT, Known, Learned, rising, weighed
from .speedup import between

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


SAMPLES_KEPT = 15
INTERPOLATED_COST_WEIGHT = 1.0
OPTIMISTIC_SHARE = 0.15
"""Of the expected rise of the costs of longer drafts: what is left of it if they turn out cheap."""
LEAST_WEIGHT = 0.4
SAMPLES_FOR_SPREAD = 4
PLAIN_STEPS_FOR_COSTS = 3
ROUNDS_FOR_COSTS = 2
ROUNDS_TO_KNOW = 5.0
"""So many rounds of earlier texts tell more of a length than the seconds of their plain steps."""
TYPICAL_SPREAD = 0.15
NORMAL_MEDIAN_DEVIATION = 0.6745
"""Median distance of a normal sample from the median, in standard deviations."""
UNLIKELY = 2.3
"""Standard deviations that noise explains; more is seen once in fifty times."""
CONTRADICTED = 0.25
"""A round can take longer than it costs, never so much less: earlier costs are then wrong, all."""
SHORTEST = 1e-9
"""Seconds of a round by a clock that stood still."""


class _Median:
    """The median of the last few samples: one stalled round does not move it."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self.value = 0.0
        self.count = 0

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = median(self._samples)
        self.count = len(self._samples)

    def __iter__(self) -> Iterator[float]:
        return iter(self._samples)

    def spread(self) -> float:
        """Standard deviation of a sample relative to the median, roughly."""
        if self.count < SAMPLES_FOR_SPREAD or not self.value:
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
    lies on the straight line through those that were. What is seen counts as it would have been
    when the text began: see Pace. tried: lengths that were measured earlier, or that this text has
    at least one round of, in order.
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
        self._most = most
        self._rounds: dict[int, _Median] = {}
        self._draft = _Median()
        self._unit = _Median()
        self._pace = Pace()
        self._noise = _Median()
        self._known = rising(learned) if learned else {}
        self.tried = tuple(sorted(self._known))
        self._earlier: dict[int, float] = {}
        self._another = 0.0
        self._totals: list[float] | None = None

    @property
    def any_known(self) -> bool:
        """Whether earlier texts measured any length."""
        return len(self._known) > 0

    @property
    def wants_parts(self) -> bool:
        """Whether what drafting alone takes would be news: there are no earlier costs to tell the
        price of another token, and too few rounds were timed in parts."""
        return not (self._free or self._known) and self._draft.count < ROUNDS_FOR_COSTS

    def only_earlier(self, count: int) -> bool:
        """Whether all that is known of a length was measured earlier."""
        return count in self._known and not self.is_measured(count)

    def is_measured(self, count: int) -> bool:
        """Whether this text has had a round of a length."""
        return count in self._rounds

    @property
    def in_seconds(self) -> bool:
        """Whether totals are seconds. Costs measured earlier are plain steps, until a round of such
        a length has told how long these take now."""
        return not self._known or self._unit.count > 0

    def add(self, count: int, seconds: float, draft: float | None) -> None:
        """A round with `count` drafted tokens; draft: seconds of drafting, where timed."""
        seconds = max(seconds, SHORTEST)
        if count in self.tried:
            self._noise.add(seconds / self._pace.seen / self._begun()[count])
        settled = self._count(count) + self.rounds_behind(count) >= SAMPLES_KEPT
        if not settled or self._pace.compares(count):
            self._learn(count, seconds / self._pace.now)
        if draft is not None and count:
            self._draft.add(draft / count / self._pace.now)
        self._totals = None
        if settled:
            # Of others it is not known whether they or the machine are slow.
            self._pace.add(count, seconds, self._begun(), self._noise.spread())

    def _learn(self, count: int, seconds: float) -> None:
        self._rounds.setdefault(count, _Median()).add(seconds)
        if count in self._known:
            sure = count > 0 and self.plain_steps >= PLAIN_STEPS_FOR_COSTS
            if sure and seconds < CONTRADICTED * self._known[count] * self._rounds[0].value:
                self._known.clear()
            else:
                self._unit.add(seconds / self._known[count])
        if count not in self.tried or not self._known:
            self.tried = tuple(sorted({*self._known, *self._rounds}))

    def _count(self, length: int) -> int:
        """How many rounds of a length this text has learned from."""
        return self._rounds[length].count if length in self._rounds else 0

    @property
    def plain(self) -> float:
        """Seconds of a plain step in this text, 0 before the first."""
        return self._pace.now * self._rounds[0].value if 0 in self._rounds else 0.0

    def totals(self) -> Sequence[float]:
        """Expected seconds for every length; plain steps if nothing was seen yet. Plain steps must
        have been seen or measured earlier."""
        totals, pace = self._begun(), self._pace.now
        return totals if pace == 1.0 else [pace * total for total in totals]

    def _begun(self) -> Sequence[float]:
        """The totals at the pace of the text's beginning."""
        if self._totals is None:
            self._totals = self._estimate()
        return self._totals

    def learned(self) -> dict[int, Learned]:
        """What this text measured, against its plain steps and its rounds of other lengths whose
        costs are known. Short texts teach one or two lengths, and many of them all."""
        _, wrong = self._scales()
        costs, known = {}, {0: 1.0} | {n: wrong * cost for n, cost in self._known.items() if n}
        earlier = self._earlier_step if self.plain_steps < PLAIN_STEPS_FOR_COSTS else []
        for n, seen in self._rounds.items():
            steps = [s / known[m] for m, s in self._samples() if m != n and m in known]
            if self.rounds_behind(n) < ROUNDS_TO_KNOW:
                # The machine may have been faster or slower then.
                steps += earlier
            if n and steps:
                rounds = 1 / (1 / seen.count + 1 / len(steps))
                costs[n] = Learned(seen.value / median(steps), rounds)
        if self.plain_steps >= PLAIN_STEPS_FOR_COSTS:
            costs[0] = Learned(self.plain, float(self.plain_steps))
        return costs

    def _samples(self) -> Iterator[tuple[int, float]]:
        return ((n, seconds) for n, seen in self._rounds.items() for seconds in seen)

    def rounds_behind(self, count: int) -> float:
        """How many rounds an earlier cost stands for."""
        return self._weights.get(count, 0.0)

    @property
    def plain_steps(self) -> int:
        """How many plain steps this text has seen."""
        return self._count(0)

    @property
    def step_is_known(self) -> bool:
        """Whether any text ever measured a plain step."""
        return bool(self._earlier_step or 0 in self._rounds)

    def errors(self) -> list[float]:
        """Relative standard error of the median of each length that was seen."""
        return [seen.spread() / math.sqrt(seen.count) for seen in self._rounds.values()]

    def doubt(self) -> Sequence[float]:
        """Relative standard error of each total, roughly; 0 for plain steps."""
        spread = self._noise.spread()
        errors = [0.0] + self._most * [spread / math.sqrt(LEAST_WEIGHT)]
        for n in self.tried:
            weight = self._count(n) + (self.rounds_behind(n) if n in self._known else 0.0)
            errors[n] = spread / math.sqrt(max(LEAST_WEIGHT, weight)) if n else 0.0
        return errors

    def hopeful(self) -> Sequence[float]:
        """The totals, with lengths beyond all that were tried on the cheap side: as if more rows in
        the target's pass were nearly free."""
        totals, longest = self.totals(), self.tried[-1]
        more = self._pace.now * self._another
        flat = [totals[longest] + count * more for count in range(len(totals) - longest)]
        beyond = [
            f + OPTIMISTIC_SHARE * (t - f) for f, t in zip(flat, totals[longest:], strict=True)
        ]
        return [*totals[:longest], *beyond]

    def _draft_step(self) -> float:
        """What another drafted token takes in drafting: as timed, or else no more than it ever
        added to an earlier cost."""
        if self._free or self._draft.count or not self._known:
            return self._draft.value
        rises = (
            (self._earlier[more] - self._earlier[fewer]) / (more - fewer)
            for fewer, more in pairwise(sorted(self._earlier))
        )
        return max(0.0, min(rises, default=0.0))

    def _scales(self) -> tuple[float, float]:
        """Seconds that a plain step of earlier costs stands for, and by what factor those of drafts
        are wrong: where noise does not explain what this text's rounds took, all are."""
        seen = {n: each for n, each in self._rounds.items() if n and n in self._known}
        rounds = sum(each.count for each in seen.values())
        if not rounds or self.plain_steps < PLAIN_STEPS_FOR_COSTS:
            return self._unit.value or 1.0, 1.0
        steps = self._rounds[0]
        off = sum(s.count * math.log(s.value / self._known[n]) for n, s in seen.items()) / rounds
        off -= math.log(steps.value)
        noise = max(TYPICAL_SPREAD, steps.spread()) * math.sqrt(1 / steps.count + 1 / rounds)
        if abs(off) < UNLIKELY * noise:
            return self._unit.value, 1.0
        return steps.value, math.exp(off)

    def _estimate(self) -> list[float]:
        unit, wrong = self._scales()
        self._earlier = {n: cost * unit * (wrong if n else 1.0) for n, cost in self._known.items()}
        totals: list[float] = []
        self._another = self._draft_step()
        for n in range(self._most + 1):
            weight = INTERPOLATED_COST_WEIGHT
            if n in self._known:
                cost, weight = self._earlier[n], self._weights.get(n, EARLIER_COST_WEIGHT)
            else:
                cost = self._line(totals, n) if n else self._rounds[0].value
            if n in self._rounds:
                # One unlucky sample must not rule a length out for good.
                seen = self._rounds[n]
                cost = (seen.count * seen.value + weight * cost) / (seen.count + weight)
            totals.append(cost)
        return totals

    def _line(self, totals: Sequence[float], count: int) -> float:
        """Between what is known of shorter and longer drafts."""
        place = bisect_left(self.tried, count)
        below = self.tried[place - 1]
        start = totals[below]
        above = next((n for n in self.tried[place:] if n > count), None)
        if above is None:
            slope = (start - totals[0]) / below if below else 0.0
            return start + (count - below) * max(slope, self._another)
        end = self._earlier[above] if above in self._known else self._rounds[above].value
        return between({below: start, above: end}, count)
