"""What a round costs and what it brings, learned while decoding.

Nothing is decided here. Plain Python numbers only: it runs once a round.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

from .speedup import between, emitted

SAMPLES_KEPT = 15
EARLIER_COST_WEIGHT = 20.0
"""How many rounds of this sequence a cost that was measured earlier counts for."""
INTERPOLATED_COST_WEIGHT = 1.0
OPTIMISTIC_SHARE = 0.15
"""Of the expected rise of the costs of longer drafts: what is left of it if they turn out cheap."""
SAMPLES_FOR_SPREAD = 4
PLAIN_STEPS_FOR_COSTS = 3
ROUNDS_FOR_COSTS = 2
TYPICAL_SPREAD = 0.15
NORMAL_MEDIAN_DEVIATION = 0.6745
"""Median distance of a normal sample from the median, in standard deviations."""
PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 3.0
POOLED_WEIGHT = 4.0
EARLIER_ROUNDS = 12.0
"""How many rounds of this text the verdicts of earlier texts count for, at most."""
CONTRADICTED = 0.25
"""A round can take longer than it costs, never so much less: an earlier cost is then wrong."""


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

    known: costs measured earlier, in plain steps, by length. free: drafting itself takes no time.
    A length that was neither measured
    nor tried lies on the straight line through those that were.
    """

    def __init__(
        self, most: int, known: Mapping[int, float] | None = None, *, free: bool = False
    ) -> None:
        self._free = free
        self._rounds = [_Median() for _ in range(most + 1)]
        self._draft = _Median()
        self._unit = _Median()
        self._known = {0: 1.0, **known} if known else {}
        self._corrected: set[int] = set()
        self._totals: list[float] | None = None

    @property
    def tried(self) -> tuple[int, ...]:
        """Lengths that were measured earlier, or that this text has at least one round of."""
        return tuple(n for n, seen in enumerate(self._rounds) if n in self._known or len(seen))

    @property
    def wants_parts(self) -> bool:
        """Whether what drafting alone takes would be news: there are no earlier costs to tell the
        price of another token, and too few rounds were timed in parts."""
        return not (self._free or self._known) and len(self._draft) < ROUNDS_FOR_COSTS

    def only_earlier(self, count: int) -> bool:
        """Whether all that is known of a length was measured earlier."""
        return count in self._known and not len(self._rounds[count])

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
                del self._known[count]
                self._corrected.add(count)
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

    def measured(self) -> dict[int, float]:
        """Costs in plain steps of the lengths that this text has a few rounds of: short texts teach
        one or two lengths, and many of them all."""
        # A text that never decoded plainly knows from earlier costs how long a plain step takes.
        steps = self._rounds[0] if len(self._rounds[0]) >= PLAIN_STEPS_FOR_COSTS else self._unit
        if len(steps) < PLAIN_STEPS_FOR_COSTS:
            return {}
        plain = steps.value
        longer = enumerate(self._rounds[1:], start=1)
        return {
            n: seen.value / plain
            for n, seen in longer
            if len(seen) >= (1 if n in self._corrected else ROUNDS_FOR_COSTS)
        }

    def doubt(self) -> Sequence[float]:
        """Relative standard error of each total, roughly; 0 for plain steps."""
        spread = self._rounds[0].spread()
        errors = [0.0]
        for count, seen in enumerate(self._rounds[1:], start=1):
            weight = len(seen) + (EARLIER_COST_WEIGHT if count in self._known else 0.0)
            errors.append(spread / math.sqrt(max(1.0, weight)))
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
            (self._known[more] - self._known[fewer]) / (more - fewer)
            for fewer, more in pairwise(sorted(self._known))
        )
        return max(0.0, min(rises, default=0.0)) * (self._unit.value or 1.0)

    def _estimate(self) -> list[float]:
        totals: list[float] = []
        tried = self.tried
        for count, seen in enumerate(self._rounds):
            if count in self._known:
                line, weight = self._known[count] * (self._unit.value or 1.0), EARLIER_COST_WEIGHT
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
        known = self._known.get(above)
        end = self._rounds[above].value if known is None else known * (self._unit.value or 1.0)
        return between({below: start, above: end}, count)


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
        for drafted, accepted in verdicts:
            for index in range(min(drafted, accepted + 1, len(self._reached))):
                self._reached[index] += 1.0
                self._passed[index] += index < accepted
                self._own[0][index] += 1.0
                self._own[1][index] += index < accepted

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
