"""How many tokens to draft in the next round, zero included.

Reads no clock: it hears of every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..costs.online import Acceptance, RoundCosts, Verdicts
from ..errors import OptionError
from .rounds import RoundListener, RoundReport


@dataclass(frozen=True)
class Change:
    """From round `round` on, counted from 0, `length` tokens were drafted, because they promised
    `speed` times plain decoding. source: by whom, where several may; rounds are its own then."""

    round: int
    length: int
    speed: float
    source: str = ""


class DraftLength(RoundListener, Protocol):
    """Chooses the number of drafted tokens; 0 means a plain decoding step."""

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen when; empty where it was fixed."""
        ...

    @property
    def wants_parts(self) -> bool:
        """Whether the next round of drafts should be timed in parts, at the price of overlap."""
        ...

    def choose(self, remaining: int, rows: int = 1) -> int:
        """At most remaining - 1 tokens, so that a bonus token never overruns.

        remaining: how many tokens may still be emitted, at least 1. rows: sequences of the batch.
        """
        ...

    def on_round(self, report: RoundReport) -> None:
        """As rounds.RoundListener says."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same number in every round; 0 is plain decoding.

    Raises OptionError for a negative number.
    """

    count: int
    changes: Sequence[Change] = ()
    wants_parts: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    def choose(self, remaining: int, rows: int = 1) -> int:
        """`count`, or less where the text is about to end."""
        return max(0, min(self.count, remaining - 1))

    def on_round(self, report: RoundReport) -> None:
        """Nothing is learned."""


class Survey:
    """Every length in turn, to measure what each costs: PLAIN_STEPS plain steps, then 1 to `most`
    tokens.

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
        if _is_drained(report):
            return
        if self._place not in self._ignored and report.size == self._turn[self._place]:
            self._costs.add(report.size, report.times.total, report.times.draft)
        self._place = (self._place + 1) % len(self._turn)
        self.turns += self._place == 0

    def measured(self) -> dict[int, float]:
        """Costs in plain steps of every length that was seen often enough."""
        return self._costs.measured()


class AutoLength:
    """The number that promises most tokens per second, from costs and acceptance seen so far.

    known: costs of rounds by drafted length in plain steps, measured earlier. Without them the text
    begins with a few plain steps and one round of FIRST_DRAFT tokens. most: where a proposer has no
    more. acceptance: learned elsewhere, and shared from here on. free: drafting itself takes no
    time. saved: of the budget of earlier texts, where there were any.

    What may be worse than the best known length is tried only out of a budget: BUDGET_AT_START
    plain steps, or BUDGET_PER_TEXT and what earlier texts left, which save for one another; and
    BUDGET_SHARE of the time since. It pays for trials of lengths that would be better if their
    costs, badly known, were kind, since costs need not rise in a line; and while plain decoding is
    best for probes, so that a draft that turns good is noticed.

    After the first ROUNDS_ALWAYS_PLANNED rounds it thinks again once in PLANS_EVERY rounds only,
    and never where the proposer abstained: thinking is not free.
    """

    LONGEST_DRAFT = 16
    FIRST_DRAFT = 3
    PLAIN_STEPS_FIRST = 4
    WORTH_CHANGING = 1.04
    BUDGET_AT_START = 1.5
    BUDGET_PER_TEXT = 0.25
    MOST_SAVED = 3.0
    LARGEST_LOSS = 1.0
    """In plain steps, of a trial of a length that only earlier texts knew: they may be wrong."""
    BUDGET_SHARE = 0.008
    ROUNDS_ALWAYS_PLANNED = 24
    PLANS_EVERY = 4

    def __init__(
        self,
        known: Mapping[int, float] | None = None,
        most: int = LONGEST_DRAFT,
        acceptance: Acceptance | None = None,
        *,
        free: bool = False,
        saved: float | None = None,
    ) -> None:
        self._most = min(most, self.LONGEST_DRAFT)
        known = {n: cost for n, cost in (known or {}).items() if n <= self._most}
        self._costs = RoundCosts(self._most, known, free=free)
        self._acceptance = acceptance or Acceptance(self._most)
        self._at_start = self.BUDGET_AT_START if saved is None else saved + self.BUDGET_PER_TEXT
        self._begun = bool(known)
        self._plain = 0
        self._speculative = 0
        self._current = 0
        self._asked = 0
        self._plain_for = 0
        self._parked_for = 0
        self._catch_up = 0.0
        self._spent = 0.0
        self._price = 0.0
        self._trying = False
        self._repeat = 0
        self._elapsed = 0.0
        self._changes: list[Change] = []
        self._next = self._plan() if self._begun else 0

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen when, single trials left out."""
        return tuple(self._changes)

    @property
    def wants_parts(self) -> bool:
        """Whether too little is known of what drafting alone takes."""
        return self._costs.wants_parts

    def measured(self) -> dict[int, float]:
        """Costs of rounds by drafted length in plain steps, where this text had enough of them."""
        return self._costs.measured()

    @property
    def verdicts(self) -> Verdicts:
        """What this text's drafts came to."""
        return self._acceptance.verdicts

    @property
    def saved(self) -> float:
        """What of the budget was not spent, in plain steps, for a text that is yet to come; less
        than 0 where more was spent."""
        plain = self._costs.plain
        left = self._budget(plain) / plain if plain else self._at_start
        return min(max(-self.MOST_SAVED, left), self.MOST_SAVED)

    def choose(self, remaining: int, rows: int = 1) -> int:
        """The current choice, cut where the text is about to end."""
        self._asked = max(0, min(self._next, remaining - 1))
        return self._asked

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again."""
        if _is_drained(report):
            return
        drafted, seconds = report.size, report.times.total
        self._elapsed += seconds
        trial = self._trying
        if drafted:
            self._observe_round(report, drafted, seconds, report.times.draft)
        else:
            self._observe_plain(seconds)
        if self._begun and not drafted and self._asked:
            # The proposer abstained: nothing of drafts was learned, and thinking costs more.
            return
        if self._begun:
            rounds = self._plain + self._speculative
            due = rounds < self.ROUNDS_ALWAYS_PLANNED or rounds % self.PLANS_EVERY == 0
            if trial or self._repeat or (due and not self._parked_and_broke()):
                self._next = self._plan()
        elif self._plain >= self.PLAIN_STEPS_FIRST:
            self._next, self._begun = min(self.FIRST_DRAFT, self._most), True

    def _observe_plain(self, seconds: float) -> None:
        self._plain += 1
        self._plain_for += 1
        # A proposer that abstained has read the text all the same.
        self._parked_for += self._asked == 0
        # The first step of a stretch fills the pipeline and costs more than a step.
        if self._plain_for > 1 or self._plain == 1:
            self._costs.add(0, seconds, None)

    def _observe_round(
        self, report: RoundReport, drafted: int, seconds: float, draft: float | None
    ) -> None:
        self._acceptance.add([(each.drafted, each.accepted) for each in report.sequences])
        accepted = report.accepted / max(1, len(report.sequences))
        self._speculative += 1
        if self._trying:
            self._spent += max(0.0, seconds - (accepted + 1) * self._price)
            self._trying = False
        if drafted <= self._most:
            if self._parked_for and (self._speculative > 1 or len(report.sequences) > 1):
                # This round also paid for what the draft had not read yet.
                self._catch_up = max(0.0, seconds - self._costs.totals()[drafted])
                self._repeat = drafted
            else:
                self._costs.add(drafted, seconds, draft)
        self._plain_for = self._parked_for = 0

    def _plan(self) -> int:
        if self._repeat:
            # What a length costs shows in the round after the one that caught up.
            repeat, self._repeat, self._trying = self._repeat, 0, True
            return repeat
        tokens, costs = self._acceptance.emitted(), self._costs.totals()
        if not self._costs.in_seconds:
            # What was not measured earlier cannot be compared with what was.
            return self._best(tokens, costs, self._costs.tried)
        doubts = self._costs.doubt()
        # What is known badly must promise more; among many lengths some always look lucky.
        safe = [cost * (1 + doubt) for cost, doubt in zip(costs, doubts, strict=True)]
        best = self._best(tokens, safe, range(self._most + 1))
        self._price = safe[best] / tokens[best]
        budget = self._budget(costs[0])
        if budget <= 0:
            return best
        trial = self._trial(tokens, doubts)
        if trial is None and best == 0:
            trial = self._probe(tokens, safe)
        if trial is None or trial == best:
            return best
        loss = max(0.0, safe[trial] - tokens[trial] * self._price)
        if self._costs.only_earlier(trial):
            loss = min(loss, self.LARGEST_LOSS * costs[0])
        if self._parked_for:
            loss += self._catch_up
        if loss > budget and trial <= self._costs.tried[-1]:
            return best
        self._trying = True
        return trial

    def _budget(self, plain: float) -> float:
        return self._at_start * plain + self.BUDGET_SHARE * self._elapsed - self._spent

    def _parked_and_broke(self) -> bool:
        """Nothing could change: plain steps alone say nothing of drafts, and trials cost."""
        return self._current == self._next == 0 and self._budget(self._costs.plain) <= 0

    def _best(self, tokens: Sequence[float], costs: Sequence[float], among: Sequence[int]) -> int:
        rates = [token / max(cost, 1e-12) for token, cost in zip(tokens, costs, strict=True)]
        best = max(among, key=rates.__getitem__)
        if best == 0 or rates[best] > self.WORTH_CHANGING * rates[self._current]:
            if best != self._current or not self._changes:
                speed = rates[best] / rates[0]
                self._changes.append(Change(self._plain + self._speculative, best, speed))
            self._current = best
        return self._current

    def _probe(self, tokens: Sequence[float], costs: Sequence[float]) -> int:
        """The length that buys most verdicts beside plain decoding: of n drafted tokens
        tokens[n - 1] are expected to get one."""
        losses = [max(1e-9, c - t * costs[0]) for c, t in zip(costs, tokens, strict=True)]
        return min(range(1, self._most + 1), key=lambda n: losses[n] / tokens[n - 1])

    def _trial(self, tokens: Sequence[float], doubts: Sequence[float]) -> int | None:
        """The length that would be best, and better than the chosen one, if costs were kind."""
        kind = [c * (1 - d) for c, d in zip(self._costs.hopeful(), doubts, strict=True)]
        rates = [token / max(cost, 1e-12) for token, cost in zip(tokens, kind, strict=True)]
        chosen = max(range(1, self._most + 1), key=rates.__getitem__)
        return chosen if rates[chosen] * self._price > self.WORTH_CHANGING else None


def _is_drained(report: RoundReport) -> bool:
    """Whether a plain step only emptied the pipeline, so that it says nothing of what one costs."""
    return report.size == 0 and not report.pipelined
