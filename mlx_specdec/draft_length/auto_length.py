"""How many tokens to draft in the next round, learned from what rounds cost and bring.

Reads no clock: it hears of every round.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..interfaces import Prices
from ..interfaces.rounds import RoundReport, is_drained
from .acceptance import Acceptance
from .budget import Budget
from .choice import Choice
from .experience import Experience
from .learned import Known, Learned
from .length import Change
from .online import RoundCosts
from .reach import Reach
from .speedup import rates
from .unread import Unread

ROUNDS_A_STEP = 10.0
"""So many rounds behind a cost are worth a plain step of the budget for measuring it again."""
ROUNDS_FOR_SHARE = 8
"""Of a batch, in which some sequences may draft and others not."""


class AutoLength:
    """The number that promises most tokens per second, from costs and acceptance seen so far.

    known: costs measured earlier, as online.RoundCosts has them; guessed says that they are of
    other circumstances. Without any the text begins with a few plain steps and one round of
    FIRST_DRAFT tokens. most: where a proposer has no more. acceptance: learned elsewhere, and
    shared from here on. free: drafting itself takes no time, and no prompt has to be read for it.
    budget: pays for trials, and may be shared. reading: what it took earlier texts to read a prompt
    for the first draft, in plain steps. source: whose drafts these are; None where nobody else
    drafts. stops: a draft may end sooner than asked, and its next token counts as one that would
    not have stayed (reach.py). rows: sequences of the batch.

    What may be worse than the best known length is tried only out of the budget: lengths that would
    be better if their costs, badly known, were kind, since costs need not rise in a line; and while
    plain decoding is best probes, so that a draft that turns good is noticed.

    After the first ROUNDS_ALWAYS_PLANNED rounds it thinks again once in PLANS_EVERY rounds only,
    and never where the proposer abstained: thinking is not free.
    """

    LONGEST_DRAFT = 16
    FIRST_DRAFT = 3
    PLAIN_STEPS_FIRST = 4
    LARGEST_LOSS = 1.0
    """In plain steps, of a trial of a length that only earlier texts knew: they may be wrong."""
    MOST_LUCK = 0.4
    """Where times scatter, what was never tried must not seem the cheapest by far."""
    MOST_FOR_SURVEY = 0.5
    """Plain steps that a round may lose."""
    ROUNDS_ALWAYS_PLANNED = 24
    PLANS_EVERY = 4

    def __init__(
        self,
        known: Known | None = None,
        most: int = LONGEST_DRAFT,
        acceptance: Acceptance | None = None,
        *,
        free: bool = False,
        guessed: bool = False,
        budget: Budget | None = None,
        reading: float = 0.0,
        source: str | None = None,
        stops: bool = False,
        rows: int = 1,
    ) -> None:
        self._most = min(most, self.LONGEST_DRAFT)
        self._costs = RoundCosts(self._most, known, free=free)
        self._acceptance = acceptance or Acceptance(self._most)
        self._budget = budget or Budget()
        self._settled = self._acceptance.settled
        self._unread = Unread(free, reading)
        self._free = free
        self._source = source
        self._reach = Reach(self._most, stops)
        self._choice = Choice()
        self._priced = False
        self._guessed = guessed and self._costs.any_known
        self._begun = self._costs.any_known and not guessed
        self._rounds = 0
        self._rows = rows
        self._drafting = 1.0
        self._plain_for = 0
        self._asked = 0
        self._price = 0.0
        self._trying = False
        self._repeat = 0
        self._plain_to_come = 0
        self._next = self._plan() if self._begun else 0
        # What is wanted soon reads the prompt along with the target.
        self._unread.any &= self._begun and self._next == 0

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen when, single trials left out."""
        return tuple(self._choice.changes)

    @property
    def wants_parts(self) -> bool:
        """Whether too little is known of what drafting alone takes."""
        return self._costs.wants_parts

    def learned(self) -> dict[int, Learned]:
        """Costs of rounds by drafted length, as this text had them."""
        return self._costs.learned()

    @property
    def experience(self) -> Experience:
        """What texts to come may begin with."""
        plain = self.plain
        costs = self._costs.totals() if plain else ()
        reading = self._unread.prompt(costs, plain)
        return Experience(self._acceptance.verdicts, self._budget.saved(plain, reading), reading)

    def choose(self, remaining: int, rows: int = 1) -> int:
        """The current choice, cut where the text is about to end."""
        self._rows = rows
        self._asked = max(0, min(self._next, remaining - 1))
        return self._asked

    @property
    def reads_along(self) -> bool:
        """Whether a draft is wanted soon, so that its drafter reads the prompt beside the target;
        else it reads nothing before its first draft."""
        return not self._unread.any

    def prices(self) -> Prices | None:
        """What rounds and tokens cost, once that is known; None in trials, whose lengths stand."""
        self._priced = self._price > 0 and self._costs.in_seconds and not self._trying
        return Prices(self._costs.totals(), self._price) if self._priced else None

    @property
    def plain(self) -> float:
        """Seconds of a plain step, 0 where they are not known."""
        known = self._costs.tried and self._costs.in_seconds
        return self._costs.totals()[0] if known else 0.0

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again."""
        if is_drained(report):
            # The next plain step fills the pipeline again.
            self._plain_for = 0
            return
        trial = self._trying
        self._rounds += 1
        # Rounds without drafts teach nothing of them.
        self._budget.earn(report.times.total, self._settled if report.size else 0.0)
        if report.size:
            self._observe_round(report)
        else:
            self._observe_plain(report.times.total)
        if self._plain_to_come:
            self._plain_to_come -= 1
            if self._plain_to_come:
                return
            lost = 1 - 1 / self._choice.speed
            self._budget.spend(self.PLAIN_STEPS_FIRST * lost * self._costs.plain)
        if self._begun and not report.size and self._asked:
            # The proposer abstained: nothing of drafts was learned, and thinking costs more.
            return
        if self._begun:
            due = self._rounds < self.ROUNDS_ALWAYS_PLANNED or self._rounds % self.PLANS_EVERY == 0
            # Plain steps alone say nothing of drafts, and trials cost.
            stuck = (
                self._choice.length == self._next == 0 and self._budget.left(self._costs.plain) <= 0
            )
            if trial or self._repeat or (due and not stuck):
                self._next = self._plan()
        elif self._rounds >= self.PLAIN_STEPS_FIRST and self._budget.left(self._costs.plain) > 0:
            self._begun = True
            # Many rows make a long draft dear.
            first = min(self.FIRST_DRAFT if self._rows == 1 else 1, self._most)
            self._next = self._plan() if self._guessed else first

    def _observe_plain(self, seconds: float) -> None:
        self._plain_for += 1
        # A proposer that abstained has read the text all the same.
        if self._begun and self._asked == 0 and not self._plain_to_come:
            self._unread.skip()
        # The first step of a stretch fills the pipeline and costs more than a step.
        if self._plain_for > 1 or self._rounds == 1:
            self._costs.add(0, seconds, None)

    def _observe_round(self, report: RoundReport) -> None:
        drafted, seconds, rows = report.size, report.times.total, len(report.sequences)
        own = [each for each in report.sequences if self._source in (None, each.source)]
        self._acceptance.add(
            [(self._reach.judged(self._asked, each), each.accepted) for each in own]
        )
        if self._priced:
            # How far a draft got is counted as what became of its tokens is.
            self._reach.add(self._asked, own)
            self._priced = False
        share = sum(each.drafted > 0 for each in report.sequences) / rows
        self._drafting += (share - self._drafting) / ROUNDS_FOR_SHARE
        if self._trying:
            self._budget.spend(seconds - (report.accepted / rows + 1) * self._price)
            self._trying = False
        if drafted <= self._most:
            # What takes far less, though it had to read, was expected to take too much.
            as_feared = seconds > self._costs.totals()[drafted] / 2
            # Batches never read along.
            unread = self._unread.any or (rows > 1 and not self._unread.measured)
            if unread and as_feared:
                self._unread.read(drafted, seconds)
                self._repeat = 0 if self._costs.is_measured(drafted) else drafted
            else:
                self._costs.add(drafted, seconds, report.times.draft)
                self._unread.any = False
        self._plain_for = 0

    def _plan(self) -> int:
        chosen = self._weigh()
        undecided = self._acceptance.undecided and self._costs.in_seconds and self._rows == 1
        if chosen or self._free or self._plain_to_come or not undecided:
            return chosen
        return self._survey()

    def _survey(self) -> int:
        """The length to draft for the sake of verdicts, while there are too few to give drafting
        up: their price is paid once a pair. 0 where it is high."""
        costs, tokens = self._costs.totals(), self._acceptance.emitted()
        length = _probe(tokens, costs)
        loss = costs[length] - tokens[length] * costs[0]
        return length if loss <= self.MOST_FOR_SURVEY * costs[0] else 0

    def _weigh(self) -> int:
        if self._repeat:
            # What a length costs shows in the round after the one that caught up.
            repeat, self._repeat, self._trying = self._repeat, 0, True
            return repeat
        # Of a batch those that have nothing to draft pay for the others, and gain nothing.
        tokens = [1 + self._drafting * (each - 1) for each in self._acceptance.emitted()]
        costs = self._reach.costs(self._costs.totals())
        if not self._costs.in_seconds:
            # What was not measured earlier cannot be compared with what was.
            best = self._best(tokens, costs, self._costs.tried)
            return 0 if self._lacks_plain_steps(1.0) else best
        doubts = self._costs.doubt()
        # What is known badly must promise more; among many lengths some always look lucky.
        safe = [cost * (1 + doubt) for cost, doubt in zip(costs, doubts, strict=True)]
        best = self._best(tokens, safe, range(self._most + 1))
        self._price = safe[best] / tokens[best]
        budget = self._budget.left(costs[0])
        guess = self._guessed and best > 0 and self._costs.only_earlier(best)
        if budget <= 0 or guess:
            self._trying = guess and budget > 0
            return best if self._trying or not guess else 0
        if self._lacks_plain_steps(costs[0]):
            return 0
        trial = self._trial(tokens, doubts)
        if trial is None and best == 0:
            trial = _probe(tokens, safe)
        if trial is None or trial == best:
            return best
        loss = self._loss(trial, safe, tokens, self._price)
        if trial > self._costs.tried[-1]:
            # Nobody knows what such a round costs, but what is read for it.
            loss = self._reading(costs)
        self._trying = loss <= budget
        return trial if self._trying else best

    def _best(self, tokens: Sequence[float], costs: Sequence[float], among: Sequence[int]) -> int:
        # In a batch there are verdicts enough, and drafts cost more than their rounds.
        doubt = self._acceptance.doubt if self._rows == 1 else 0.0
        return self._choice.best(
            tokens, costs, among, rounds=self._rounds, rows=self._rows, doubt=doubt
        )

    def _lacks_plain_steps(self, plain: float) -> bool:
        """Whether a few plain steps come next, out of the budget: without them nothing tells
        whether drafting still pays. What is known well waits longer for them, what no text ever
        held against a plain step not at all."""
        if self._choice.length == 0 or self._free or self._costs.plain_steps:
            return False
        steps = self.PLAIN_STEPS_FIRST * (1 - 1 / self._choice.speed)
        rounds = self._costs.rounds_behind(self._choice.length)
        price = min(steps + rounds / ROUNDS_A_STEP, Budget.MOST_SAVED)
        due = price <= self._budget.left(plain) / plain
        if self._costs.step_is_known and not due:
            return False
        self._plain_to_come = self.PLAIN_STEPS_FIRST
        return True

    def _trial(self, tokens: Sequence[float], doubts: Sequence[float]) -> int | None:
        """The length that would be best, and better than the chosen one, if costs were kind."""
        hopeful = self._reach.costs(self._costs.hopeful())
        kind = [c * (1 - min(d, self.MOST_LUCK)) for c, d in zip(hopeful, doubts, strict=True)]
        speeds = rates(tokens, kind)
        chosen = max(range(1, self._most + 1), key=speeds.__getitem__)
        worth = self._choice.worth_trying(self._rows)
        return chosen if speeds[chosen] * self._price > worth else None

    def _loss(
        self, length: int, costs: Sequence[float], tokens: Sequence[float], price: float
    ) -> float:
        """Seconds that a round is expected to lose where a token is had for `price`. What only
        earlier texts knew may be wrong, and is tried in the end."""
        plain = costs[0]
        loss = max(0.0, costs[length] - tokens[length] * price)
        if self._unread.any and not self._costs.is_measured(length):
            # A round that reads is followed by another one, whose cost shows.
            loss *= 2
        if self._costs.only_earlier(length):
            loss = min(loss, self.LARGEST_LOSS * plain)
        loss += self._reading(costs)
        return loss if self._unread.measured else min(loss, Budget.MOST_SAVED * plain)

    def _reading(self, costs: Sequence[float]) -> float:
        """Seconds that the next draft takes longer, as far as the budget can ever pay for it."""
        price = self._unread.price(costs, costs[0])
        return price if self._unread.measured else min(price, Budget.MOST_SAVED * costs[0])


def _probe(tokens: Sequence[float], costs: Sequence[float]) -> int:
    """The length that buys most verdicts beside plain decoding: of n drafted tokens tokens[n - 1]
    are expected to get one."""
    losses = [max(1e-9, c - t * costs[0]) for c, t in zip(costs, tokens, strict=True)]
    return min(range(1, len(costs)), key=lambda n: losses[n] / tokens[n - 1])
