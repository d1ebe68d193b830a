"""The choice of the draft length, from the chance that draft tokens are accepted and the costs of
rounds.

Let chances[i] be the probability that draft tokens 0 .. i are all accepted. A round with n draft
tokens then brings 1 + chances[0] + ... + chances[n - 1] tokens on average. `values` divides this by
the round's cost. Everything that weighs drafts against their cost calls it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import mul
from typing import TYPE_CHECKING

from ..results import Step
from ..types import Proposal
from .costs import FIRST_TRIAL, LONGEST_DRAFT, CostTable, Memory

if TYPE_CHECKING:
    from .row import Row
    from .statistics import Timed

CHOICE_INTERVAL, TRIAL_ROUNDS, TRIAL_INTERVAL = 8, 3, 64
"""Rounds between two choices, of a trial, and between two trials. The first trials are
FIRST_TRIAL, 2 FIRST_TRIAL, ... rounds apart. In a group, this is multiplied by the number of rows,
because a trial costs more there. Of three plain steps of a trial, only the second one is timed."""
BETTER = 1.03
"""In a group, drafting must be 3 % better than plain decoding for each doubling of the rows. They
end at different times, and a row that has ended costs more in rounds with drafts."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is not used, judged by the cost ratio of one
draft token. A round that takes longer than this calls for a new choice at once."""
EXPECTED, PRIOR_WEIGHT, REMEMBERED_ROUNDS = 0.7, 8.0, 512
"""Acceptance rate before anything was verified, its weight in tokens, and the rounds after which
the weight of a verified token has fallen to 1/e. The drafts in weights/ reach 0.6 to 0.8. The rate
of all positions together has the same weight in the rate of each position."""
TIMING_NOISE = 0.3
"""Standard deviation of the logarithm of a single round's seconds."""
PLAIN = "", 0
"""Plain decoding, as a name and a draft length."""
SMALL_BACKLOG, LONG_PROMPT = 16, 64
"""Tokens that a proposer can prefill before a draft without a noticeable delay, and the longest
prompt that it prefills before the first output token."""


def values(chances: Sequence[float], costs: Sequence[float]) -> Iterator[float]:
    """Yield the expected tokens per cost of rounds with 0, 1, ... draft tokens.

    Args:
        chances: Entry i is the probability that draft tokens 0 .. i are all accepted.
        costs: Entry n is the cost of a round with n draft tokens."""
    tokens = accumulate(chances, initial=1.0)
    return (count / cost for count, cost in zip(tokens, costs, strict=False))


@dataclass(eq=False)
class Rate:
    """The share of events that happened, from decayed counts.

    Attributes:
        expected, weight: The share before anything was counted, and its weight in events.
        memory: Events after which the weight of an earlier one has fallen to 1/e."""

    expected: float
    weight: float
    memory: float
    counted: float = 0.0
    happened: float = 0.0

    @property
    def share(self) -> float:
        return (self.happened + self.weight * self.expected) / (self.counted + self.weight)

    def add(self, counted: float, happened: float) -> None:
        """Count events, and take from the earlier ones the weight that they lose."""
        kept = max(0.0, 1 - counted / self.memory)
        self.counted = kept * self.counted + counted
        self.happened = kept * self.happened + happened


@dataclass(frozen=True)
class Prices:
    """The measured costs of rounds, in plain decoding steps.

    Attributes:
        rounds: Entry n is the cost of a round with draft length n.
        rate: The tokens per plain step's time that the best alternative brings."""

    rounds: Sequence[float]
    rate: float

    def most(self, chances: Sequence[float]) -> int:
        """Return the draft length whose expected tokens exceed its cost by most; 0 if no draft
        length is worth it.

        Args:
            chances: See `values`; of several rows, the mean over them."""
        tokens = accumulate(chances, initial=1.0)
        gains = [count - self.rate * cost for count, cost in zip(tokens, self.rounds, strict=False)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def least(self, count: int) -> list[float]:
        """Return for each of `count` draft tokens the least probability of acceptance at which its
        verification pays. Costs need not be linear: several tokens may cost as much as one."""
        costs = self.rounds[: count + 1]
        return [
            self.rate
            * min((costs[end] - costs[at]) / (end - at) for end in range(at + 1, count + 1))
            for at in range(count)
        ]


@dataclass(frozen=True)
class Candidate:
    """A proposer, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        most: The proposer's longest draft, in tokens.
        free: Whether the proposer has no weights.
        stops: Whether a proposer with weights uses `prices` to shorten its drafts.
        costs: Name under which its costs are saved.
        text: Name under which its acceptance is saved."""

    name: str = ""
    most: int = LONGEST_DRAFT
    free: bool = False
    stops: bool = False
    costs: str = "draft"
    text: str = "draft"


class Acceptance:
    """Decayed counts of verified and of accepted draft tokens by position."""

    def __init__(self, memory: Memory, name: str) -> None:
        default = [[0.0] * LONGEST_DRAFT, [0.0] * LONGEST_DRAFT]
        self._counts = memory.entries.setdefault(f"acceptance {name}", default)

    def add(self, verified: int, accepted: int) -> None:
        """Count a draft. Tokens after the first rejected one were not verified."""
        for position in range(min(verified, accepted + 1, LONGEST_DRAFT)):
            self._counts[0][position] += 1
            self._counts[1][position] += position < accepted

    def fade(self) -> None:
        """Take away the weight that the verdicts lose in a round."""
        self._counts[:] = [
            [(1 - 1 / REMEMBERED_ROUNDS) * count for count in row] for row in self._counts
        ]

    def chances(self) -> list[float]:
        """Return for n = 1 .. MOST the probability that the first n draft tokens are accepted."""
        verified, accepted = self._counts
        rate = (sum(accepted) + PRIOR_WEIGHT * EXPECTED) / (sum(verified) + PRIOR_WEIGHT)
        rates = (a + PRIOR_WEIGHT * rate for a in accepted)
        rates = (hits / (seen + PRIOR_WEIGHT) for hits, seen in zip(rates, verified, strict=True))
        return list(accumulate(rates, mul))


@dataclass
class _Size:
    """The decisions for groups of one size, a power of two.

    Attributes:
        limits: The draft lengths of the proposers that may draft.
        rate: Tokens per plain step's time of the best candidate, which a trial does not change; for
            plain decoding in a batch, what drafts must reach.
        due: Rounds until the next choice.
        in_flight: Whether the newest round has submitted the pass of the next one.
        idle: Choices since a free proposer drafted in a group."""

    rows: int
    table: CostTable
    limits: dict[str, int] = field(default_factory=dict)
    rate: float = 1.0
    due: int = 0
    in_flight: bool = False
    idle: int = 0


class Worth:
    """The choice of the draft length of one pair: a fixed one, or every few rounds the one that
    promises the most tokens per second. Proposers without weights come first, and decide with
    `prices` what to propose. It reads no clock.

    Args:
        fixed: The draft length, or None to choose it.
        candidates: The proposers in the order in which they propose.
        memory: The saved tables of the pair, which are changed in place."""

    def __init__(
        self,
        fixed: int | None = None,
        candidates: Sequence[Candidate] = (Candidate(),),
        memory: Memory | None = None,
    ) -> None:
        self._fixed = fixed
        self._memory = memory or Memory()
        self._candidates = {each.name: each for each in candidates}
        self._paid = [each for each in candidates if not each.free]
        self._acceptance = {c.name: Acceptance(self._memory, c.text) for c in self._paid}
        self._unread = {each.name: 0.0 for each in self._paid}
        self._sizes: dict[int, _Size] = {}
        self._newest: _Size | None = None

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the draft length of the next round, at most remaining - 1; 0 means a plain
        decoding step. remaining: The number of tokens that a row may still emit, at least 1."""
        most = max(self.size(rows).limits.values(), default=0)
        return max(0, min(most, remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named proposer may draft, at most `most`."""
        return min(most, self.size(rows).limits.get(self._named(name).name, 0))

    def eager(self, name: str) -> bool:
        """Return whether the named proposer should prefill the prompt before its first draft."""
        return self.limit(name, sys.maxsize) > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        """Return the costs of rounds of the named proposer, None if it must not use them."""
        if self._fixed is not None:
            return None
        size = self.size(rows)
        return Prices(size.table.ratios[self._named(name).costs], size.rate)

    def save(self) -> None:
        """Save the learned costs and acceptance rates for later completions."""
        self._memory.save()

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        """Prepare for a row that is decoded alone.

        Args:
            context: The number of committed tokens.
            prompt: The number of prompt tokens that a proposer has to prefill.
            remaining: The number of tokens that may be emitted.
        """
        if self._fixed is not None:
            return
        size = self._sizes.setdefault(1, _Size(1, self._table(1, 0)))
        # A proposer that drafts later prefills the prompt then. This counts as a prefill even if
        # the prompt is short, because the proposer opens its cache.
        self._unread = dict.fromkeys(self._unread, max(prompt, SMALL_BACKLOG + 1.0))
        self._choose(size, context, remaining)
        if prompt > LONG_PROMPT:
            size.limits, size.due = size.limits | dict.fromkeys(self._unread, 0), 1
        self._unread |= {name: 0.0 for name in self._unread if size.limits.get(name)}

    def learn(
        self, rows: Sequence[Row], steps: Sequence[Step], proposal: Proposal, timed: Timed
    ) -> None:
        """Learn from a finished round of these rows, and choose again if that is due. steps: The
        step of each row."""
        if self._fixed is not None:
            return
        candidate, count = self._named(proposal.source), len(rows)
        size = self._newest = self.size(count)
        size.due -= 1
        size.table.trials[0] -= 1
        size.idle = 0 if proposal.size and candidate.free else size.idle
        self._time(size, candidate, proposal.size, timed)
        added = 1 + sum(step.accepted for step in steps) / count
        for name in self._unread:
            proposed = proposal.size and name == candidate.name
            self._unread[name] = 0.0 if proposed else self._unread[name] + added
        for acceptance in self._acceptance.values():
            acceptance.fade()
        for step in steps:
            drafter = self._candidates.get(step.proposer, candidate)
            if step.drafted and not drafter.free:
                # If the proposer stopped early, the token that it left out counts as rejected. If
                # a draft token ends the row, it also does, because no token follows it.
                stopped = drafter.stops and step.finish_reason is None
                stopped = stopped and step.drafted < size.limits.get(drafter.name, 0)
                accepted = min(step.accepted, len(step.tokens) - 1)
                self._acceptance[drafter.name].add(step.drafted + stopped, accepted)
        if size.due <= 0:
            size.table.fit()
            context = sum(len(row.committed) for row in rows) // count
            self._choose(size, context, sum(row.remaining for row in rows) / count)

    def _time(self, size: _Size, candidate: Candidate, drafted: int, timed: Timed) -> None:
        """Learn from the seconds of a round."""
        table, unread = size.table, self._unread.get(candidate.name, 0.0)
        kind = (candidate.costs if drafted else "", drafted, size.rows)
        self._memory.rounds[kind] += 1
        # The first plain step after a draft takes the time of two passes, and the last one none.
        steady = drafted or (timed.pipelined and size.in_flight)
        size.in_flight = timed.pipelined
        # The first round of a kind may have compiled kernels.
        if timed.interval is None or self._memory.rounds[kind] == 1 or drafted > LONGEST_DRAFT:
            return
        seconds = max(timed.interval, 1e-9)
        if drafted and unread > SMALL_BACKLOG:
            steps = seconds / table.seconds - table.ratios[candidate.costs][drafted]
            prefill = self._prefill(candidate)
            prefill[0] = (prefill[0] + max(0.0, steps / unread)) / 2
        elif steady:
            limit = size.limits.get(candidate.name, 0) if drafted and candidate.stops else 0
            length = max(drafted, limit)
            table.add(candidate.costs, length, seconds)
            if seconds > table.seconds * (1 + TOO_EXPENSIVE * max(1, length)):
                size.due = 0

    def _named(self, name: str) -> Candidate:
        """Return the proposer with this name, or the first one if no proposer has the name."""
        return self._candidates.get(name) or next(iter(self._candidates.values()))

    def size(self, rows: int) -> _Size:
        """Return the decisions for groups of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            self._sizes[rounded] = size = _Size(rounded, self._table(rounded, 0))
            self._choose(size, tries=False)
        return self._sizes[rounded]

    def _table(self, rows: int, doublings: int) -> CostTable:
        names = tuple(dict.fromkeys(candidate.costs for candidate in self._candidates.values()))
        place = rows, doublings, names
        if place not in self._memory.tables:
            self._memory.tables[place] = CostTable(self._memory, *place)
        return self._memory.tables[place]

    def _prefill(self, candidate: Candidate) -> list[float]:
        """Return the saved list whose only number is the plain steps per prefilled token."""
        return self._memory.entries.setdefault(f"prefill of {candidate.costs}", [0.0])

    def _choose(
        self, size: _Size, context: int = 0, remaining: float = math.inf, tries: bool = True
    ) -> None:
        """Choose the draft lengths of the next rounds. A trial may be due."""
        if self._fixed is not None:
            size.limits = dict.fromkeys(self._candidates, self._fixed)
            return
        if (doublings := max(0, context.bit_length() - 10)) != size.table.doublings:
            size.table = self._table(size.rows, doublings)
        table, size.limits, size.due = size.table, {}, CHOICE_INTERVAL
        if not table.ready:
            size.due = 1
            return
        rates = {PLAIN: BETTER ** math.log2(size.rows)}
        for candidate in self._paid:
            rates |= self._rates(table, candidate, remaining)
        best = max(rates, key=rates.__getitem__)
        size.rate = rates[best]
        if tries and table.trials[0] <= 0:
            table.trials[1] += 1
            table.trials[0] = size.rows * min(TRIAL_INTERVAL, FIRST_TRIAL * table.trials[1])
            if (tried := self._trial(table, rates, best)) != best:
                best, size.due = tried, TRIAL_ROUNDS
        if best != PLAIN:
            size.limits = dict([best])
        size.idle += 1
        # The search for every row of a batch takes time even if it finds nothing.
        if size.rows == 1 or size.idle % (TRIAL_INTERVAL // CHOICE_INTERVAL) <= 1:
            free = (candidate for candidate in self._candidates.values() if candidate.free)
            size.limits |= {candidate.name: candidate.most for candidate in free}

    def _rates(
        self, table: CostTable, candidate: Candidate, remaining: float
    ) -> dict[tuple[str, int], float]:
        """Return the expected tokens per plain step's time by draft length of a proposer. If the
        proposer has yet to prefill tokens, only lengths that gain this time are included."""
        unread = self._unread[candidate.name]
        prefill = unread * self._prefill(candidate)[0] if unread > SMALL_BACKLOG else 0.0
        costs = table.ratios[candidate.costs]
        # The first drafts have one token, because the proposer may be hopelessly slow.
        longest = candidate.most if table.known(candidate.costs) else 1
        if costs[1] > 1 + TOO_EXPENSIVE:
            longest = 0
        rates = values(self._acceptance[candidate.name].chances(), costs)
        return {
            (candidate.name, length): rate
            for length, rate in enumerate(islice(rates, longest + 1))
            if length and (not prefill or prefill <= remaining * (1 - 1 / rate))
        }

    def _trial(
        self, table: CostTable, rates: dict[tuple[str, int], float], best: tuple[str, int]
    ) -> tuple[str, int]:
        """Return the candidate to try. While drafts are best, every second trial is plain decoding,
        which all costs are relative to. Otherwise, it is the most promising draft length whose
        costs are uncertain, or `best` if none may be better."""
        if best != PLAIN and table.trials[1] % 2:
            return PLAIN
        hopes = dict(rates)
        for name, length in rates.keys() - {best, PLAIN}:
            weight = table.entry(self._candidates[name].costs, length)[1]
            hopes[name, length] *= math.exp(TIMING_NOISE / math.sqrt(1 + weight))
        return max(hopes, key=hopes.__getitem__)

    @property
    def learns(self) -> bool:
        """Whether it learns the costs of rounds, so that proposers may ask for `prices`."""
        return self._fixed is None

    @property
    def reason(self) -> str:
        """The reason for the draft length, in one line."""
        if self._fixed is not None:
            return f"the draft length is fixed at {self._fixed}"
        size = self._newest
        if size is None or not size.table.ready:
            return "the draft length is 0 until plain steps were timed"
        table, plain = size.table, 1 / size.table.seconds
        parts = [f"plain decoding: {1000 / plain:.1f} ms per round, {plain:.0f} tokens/s"]
        for candidate in self._paid:
            chances = self._acceptance[candidate.name].chances()
            rates = list(values(chances, table.ratios[candidate.costs]))
            limit, first = size.limits.get(candidate.name, 0), chances[0]
            parts.append(
                f"{candidate.name or 'draft'}: {limit} draft tokens, {plain * rates[limit]:.0f} "
                f"tokens/s; the first is accepted with probability {first:.2f}"
            )
        return "; ".join(parts)
