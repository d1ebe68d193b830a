"""The number of drafted tokens that brings most tokens a second, learned from rounds.

An arm is a source and a length; a plain step is an arm of all sources. The arm with the most
expected tokens for its cost is taken. Arms that might be better are tried within a budget."""

import functools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..interfaces import Prices
from ..interfaces.results import RoundReport, SequenceRound
from .acceptance import EARLIER, Acceptance
from .costs import MOST, Block, Costs, ending_sooner, unknown
from .first_rounds import FirstRounds
from .length import Change, DraftLength
from .saved import Knowledge, as_knowledge, costs_of

SHARE = 0.015
"""Of all time, what trials may lose. Hopeless drafts cost about as much; with 0.01 a draft that
gains a tenth is found later, with 0.02 texts of 12 tokens lose 1 %."""
SAVED = 3.0
"""Plain steps of the budget that texts save for others, or owe them; two fifths to begin with.
With two thirds the first text of 15 tokens runs at 0.83 of plain where drafts do not pay, instead
of 0.87; with one third no draft of two tokens is tried, and far better lengths are not found (4 %).
An arm may be better than it seems by a standard error for each saved step, and by a fifth of these
in any case."""
MARGIN = 1.03
"""What an arm must promise over the one in use. 1.05 loses 1 %, 1.01 changes by chance. Plain steps
of a batch are preferred by as much for each doubling of its rows, which end apart and leave places
empty; by twice that where all would end together, and by half where others wait."""
EVERY = 3
"""Rounds between two plans in batches and while nothing is known, and plain steps that are measured
in a row: the first one fills the pipeline and does not count. Other texts take five times as many
rounds, because learning after 3 takes a twentieth of a round of 4.5 ms and gains nothing."""


@dataclass(frozen=True)
class Source:
    """A drafter. most: of its tokens. free: drafting takes no time, and nothing has to be read for
    it; such a source may have nothing to say. stops: a draft may end sooner than it was asked to.
    costs, text: what its costs and its acceptance are saved under."""

    name: str = ""
    most: int = MOST
    free: bool = False
    stops: bool = False
    costs: str = "draft"
    text: str = "draft"


@dataclass(frozen=True)
class _Plan:
    """What the next rounds may draft. best: by source, 0 for none. limits: the same but for trials.
    speed: tokens that the best arm brings in the time of a plain step. trials: lengths that are
    tried, by source. plain: steps of a trial of plain decoding that are left."""

    best: Mapping[str, int]
    limits: Mapping[str, int]
    speed: float = 1.0
    trials: Mapping[str, int] = field(default_factory=dict)
    plain: int = 0


@dataclass
class _Size:
    """What belongs to batches of one size. next: the plan after the round in flight. drafting:
    share of the rows that drafted, by source. unread: tokens a row that the source has not read.
    stretch: plain steps since the last draft. seconds: of rounds that nothing was learned from, by
    source and length."""

    costs: Costs
    plan: _Plan
    next: _Plan
    drafting: dict[str, float]
    unread: dict[str, float]
    rounds: int = 0
    stretch: int = 0
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def learn_costs(self, context: float) -> None:
        """Learn from the rounds since the last time; of many alike the middle one tells."""
        for (name, drafted), seconds in self.seconds.items():
            for each in seconds if len(seconds) <= EVERY else [statistics.median(seconds)]:
                self.costs.add(name, drafted, each, context)
        self.seconds.clear()


@dataclass(frozen=True)
class _Arms:
    """Of one source, by length from 0, (1 + most,): expected tokens; tokens a plain step's time
    with luck; costs in plain steps, and of trials, which do not end sooner than asked; their
    standard errors. current: the length in use. reading: what the next round costs more, and that
    with one standard error."""

    tokens: np.ndarray
    hoped: np.ndarray
    costs: np.ndarray
    trials: np.ndarray
    errors: np.ndarray
    current: int
    reading: tuple[float, float]

    @functools.cached_property
    def speeds(self) -> np.ndarray:
        """Tokens a plain step's time."""
        return self.tokens / self.costs

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """The same with one standard error: what is known badly must promise more."""
        return self.speeds / np.exp(self.errors)

    def losses(self, speed: float, dearer: np.ndarray) -> np.ndarray:
        """Plain steps that trials lose where 1 / speed of one buys a token. dearer: logarithm of
        what they cost more than it seems."""
        return self.trials * np.exp(dearer) + self.reading[0] - self.tokens / speed

    def best(self, instead: float) -> int:
        """Return the best length, where a round without this source has the rate `instead`."""
        best = int(self.rates[1:].argmax()) + 1
        if self.rates[best] <= instead:
            return 0
        now = self.rates[self.current] if self.current else instead
        return best if self.rates[best] > MARGIN * now else self.current


class AutoLength(DraftLength):
    """DraftLength for all that may draft for a sequence or a batch.

    sources: in the order in which they propose; of those that are not free one at a time does.
    knowledge: of earlier texts; without any, a text begins with EVERY plain steps and drops a draft
    whose first round is too expensive. first_rounds: of the process, whose seconds are not learned
    from; None on a device that compiles nothing."""

    learns = True

    def __init__(
        self,
        sources: Sequence[Source] = (Source(),),
        knowledge: Knowledge | None = None,
        first_rounds: FirstRounds | None = None,
    ) -> None:
        knowledge, self._first_rounds = knowledge or {}, first_rounds
        self._sources = {each.name: each for each in sources}
        self._paid = tuple(each.name for each in sources if not each.free)
        self._known = {each.costs: costs_of(knowledge, each.costs) for each in sources}
        self._acceptance = {
            each.name: Acceptance(each.most, knowledge.get(f"counts {each.text}"))
            for each in sources
        }
        # How far drafts get that may end sooner than asked: until some do, none does.
        self._reached = {
            each.name: Acceptance(each.most, np.full((2, each.most), 1e3))
            for each in sources
            if each.stops
        }
        self._budget = float(knowledge.get("budget", 0.4 * SAVED))
        self._sizes: dict[int, _Size] = {}
        self._rounds = 0
        self._begun, self._late, self._remaining, self._dropped = False, False, math.inf, set[str]()
        # Rounds that nothing was learned from yet, with the plan of each and the texts' lengths.
        self._heard: list[tuple[_Size, _Plan, RoundReport, Sequence[int]]] = []
        self._changes: deque[Change] = deque(maxlen=1000)

    @property
    def changes(self) -> Sequence[Change]:
        return tuple(self._changes)

    @property
    def knowledge(self) -> Knowledge:
        blocks = {n: {r: s.costs.block(n) for r, s in self._sizes.items()} for n in self._known}
        counts = {f"counts {s.text}": self._acceptance[n].counts for n, s in self._sources.items()}
        return {**as_knowledge(blocks), **counts, "budget": np.array(self._budget)}

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the longest draft that any source may make."""
        return max(0, min(max(self._size(rows).plan.limits.values()), remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named source may draft, of at most `most`."""
        return min(most, self._size(rows).plan.limits[self._drafter(name).name])

    def eager(self, name: str) -> bool:
        """Whether the source should read a text's prompt beside the target: a draft is wanted as
        its first token, or nothing is known."""
        source = self._drafter(name)
        wanted = self._is_new(source) or self._size(1).plan.limits[source.name] > 0
        return wanted and not self._late

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        """What rounds of the source cost; of one sequence None before that is known, and in trials,
        whose lengths stand."""
        size, source = self._size(rows), self._drafter(name)
        if rows == 1 and (size.plan.trials or not size.plan.best[source.name]):
            return None
        return Prices(size.costs.rounds(source.costs, source.most)[0].tolist(), 1 / size.plan.speed)

    def begin(self, context: int, prompt: int, remaining: int, *, late: bool = False) -> None:
        """Plan for a text that is to be decoded alone. context: committed tokens. prompt: tokens
        that a drafter has to read, which are those or an encoder's. remaining: that may follow.
        late: they are read after the first token, which a plain step brings."""
        self.learn()
        self._late = late
        size = self._sizes[1] = self._sizes.get(1) or self._unplanned(1)
        size.costs.behind(context)
        size.unread |= dict.fromkeys(self._paid, float(prompt))
        self._remaining = remaining
        size.plan = size.next = self._plan(size, 1)
        size.unread |= {name: 0.0 for name in self._paid if self.eager(name)}
        if late:
            limits = {**size.plan.limits, **dict.fromkeys(self._paid, 0)}
            size.plan = replace(size.plan, limits=limits, trials={}, plain=0)
        self._begun = True

    def on_round(self, report: RoundReport) -> None:
        """Take note of a round. From one that the next ones depend on, a trial or a draft of whose
        drafter little is known, it learns at once, from a text's first rounds before the fourth,
        which ends many short texts, and from others when `learn` or `meanwhile` is called."""
        rows, source = len(report.sequences), self._drafter(report.source)
        size = self._sizes.setdefault(rounded_up(rows), self._size(rows))
        lengths = [len(each.committed) for each in report.sequences]
        self._heard.append((size, size.plan, report, lengths))
        tried = not source.free and source.name in size.plan.trials
        tells = report.size and (tried or self._acceptance[source.name].undecided)
        soon = report.ended or size.plan.plain or tells
        third = size.rounds + len(self._heard) == EVERY
        if soon or (third and (report.size or self._is_due())):
            self.learn()
        size.plan = size.next

    def learn(self) -> None:
        """Learn from the rounds since the last call and plan the next ones."""
        heard, self._heard = self._heard, []
        for each in heard:
            self._learn(*each)
        last = {id(each[0]): each for each in heard if not each[2].drained}
        for size, plan, its, lengths in last.values():
            size.learn_costs(sum(lengths) / len(lengths))
            # What is not a round of a trial that is under way must not end it.
            if plan is size.plan or not size.plan.trials:
                self._plan_next(size, plan, its)

    def meanwhile(self) -> None:
        """Learn while a pass is in flight, from several rounds at once, which takes less time."""
        if self._is_due():
            self.learn()

    def _is_due(self) -> bool:
        """Whether so many rounds were heard that learning from them is worth its time."""
        if len(self._heard) < EVERY:
            return False
        # In batches who joins or waits may decide.
        together = any(len(lengths) > 1 for _, _, _, lengths in self._heard)
        new = any(self._is_new(self._sources[name]) for name in self._paid)
        return together or new or len(self._heard) >= 5 * EVERY

    def _is_new(self, source: Source) -> bool:
        """Whether nothing is known of a source."""
        return not (self._known[source.costs] or self._acceptance[source.name].counts.any())

    def _drafter(self, name: str) -> Source:
        """The source of that name; rounds name none where there is one, and drafters whose lengths
        a caller has passed are none of its sources."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def _learn(self, size: _Size, plan: _Plan, report: RoundReport, lengths: Sequence[int]) -> None:
        source, drafted, rows = self._drafter(report.source), report.size, len(lengths)
        rounds = list(zip(lengths, report.sequences, strict=True))
        new = [max(MOST, n - each.accepted - 1) for n, each in rounds if each.position == 0]
        for name in self._paid if new and not self._begun else ():
            stay = (rows - len(new)) * size.unread[name]
            size.unread[name] = (stay + sum(new)) / rows
        # After a plain step that only emptied the pipeline the next one fills it again.
        size.stretch = 0 if drafted or report.drained else size.stretch + 1
        if not report.drained:
            self._rounds += 1
            size.rounds += 1
            for acceptance in self._acceptance.values():
                acceptance.fade()
            seconds, context = report.times.total, sum(lengths) / rows
            kind = (source.costs if drafted else "", drafted, rows)
            first = self._first_rounds is not None and self._first_rounds.add(*kind)
            timed = drafted <= MOST and not first
            if drafted:
                stops = source.stops and source.name not in plan.trials
                if stops and not all(each.ended for each in report.sequences):
                    # In a batch the longest draft tells what a round costs.
                    self._reached[source.name].add(plan.limits[source.name], drafted)
                share = sum(each.drafted > 0 for each in report.sequences) / rows
                size.drafting[source.name] += (share - size.drafting[source.name]) / EARLIER
                unread = 0.0 if source.free else size.unread[source.name]
                alone = unread <= MOST and self._is_new(source)
                if timed and alone and size.costs.too_expensive(drafted, seconds):
                    self._dropped.add(source.name)
                # Few tokens are read in the pass that drafts the first one.
                if timed and (unread > MOST or source.name in plan.trials):
                    size.learn_costs(context)
                    size.costs.add(source.costs, drafted, seconds, context, unread)
                elif timed:
                    size.seconds[source.costs, drafted].append(seconds)
            elif timed and (size.stretch > 1 or size.rounds == 1):
                size.seconds["", 0].append(seconds)
            for each in report.sequences:
                if each.drafted:
                    self._judge(each, self._sources.get(each.source, source), plan)
            if not first:
                self._pay(size, plan, report, source)
        emitted = sum(each.accepted + 1 for each in report.sequences) / rows
        self._remaining -= emitted
        for name in self._paid:
            size.unread[name] += emitted
        if drafted:
            size.unread[source.name] = 0.0

    def _judge(self, its: SequenceRound, source: Source, plan: _Plan) -> None:
        """Count a draft. A token at which it ended counts as one that would not have stayed, and so
        does one behind the end of a text that nobody knew of."""
        asked = plan.limits[source.name]
        # Drafts of a text's last round end with the text.
        stopped = source.stops and its.drafted < asked and not its.ended
        stayed = min(its.accepted, its.emitted - 1)
        self._acceptance[source.name].add(its.drafted + stopped, stayed)

    def _pay(self, size: _Size, plan: _Plan, report: RoundReport, source: Source) -> None:
        """Earn a share of the round's time, and pay for a trial what it must be expected to lose
        now: of one round luck tells most."""
        plain, drafted, lost = size.costs.plain, report.size, 0.0
        took = report.times.total / plain if plain else 1.0
        self._budget = min(self._budget + SHARE * min(took, 5.0), SAVED)
        if plan.plain and not drafted:
            lost = 1 - 1 / plan.speed
        elif drafted and source.name in plan.trials:
            its = self._arms(size, source)
            lost = float(its.losses(plan.speed, its.errors)[drafted])
        self._budget = max(-SAVED, self._budget - max(0.0, lost))

    def _plan_next(self, size: _Size, plan: _Plan, report: RoundReport) -> None:
        if plan.plain > 1 and not report.size:
            size.next = replace(plan, plain=plan.plain - 1)
            return
        best = size.next.best
        size.next = self._plan(size, len(report.sequences), report.even, report.waiting)
        for name, length in size.next.best.items():
            if length != best[name] or not self._changes:
                speed = float(self._arms(size, self._sources[name]).speeds[length])
                named = name if len(self._sources) > 1 else ""
                self._changes.append(Change(self._rounds, length, speed, named))

    def _size(self, rows: int) -> _Size:
        """Return what is known of batches of such a size; of a new one from the nearest size."""
        rows = rounded_up(rows)
        if rows in self._sizes:
            return self._sizes[rows]
        size = self._unplanned(rows)
        size.plan = size.next = self._plan(size, rows)
        return size

    def _unplanned(self, rows: int) -> _Size:
        """The same without a plan, for a caller who makes one: planning takes time."""
        costs = Costs({name: self._block(name, rows) for name in self._known})
        nobody = dict.fromkeys(self._sources, 0)
        nothing = _Plan(nobody, nobody)
        drafting, unread = dict.fromkeys(nobody, 1.0), dict.fromkeys(nobody, 0.0)
        return _Size(costs, nothing, nothing, drafting, unread)

    def _block(self, name: str, rows: int) -> Block:
        known = {**self._known[name], **{r: s.costs.block(name) for r, s in self._sizes.items()}}
        nearest = min(known, key=lambda size: abs(math.log2(size / rows)), default=rows)
        return (known.get(nearest) or unknown()).resized(rows / nearest)

    def _arms(self, size: _Size, source: Source) -> _Arms:
        name = source.name
        trials, errors = size.costs.rounds(source.costs, source.most)
        ends = self._reached.get(name)
        costs = trials if ends is None else ending_sooner(trials, ends.tokens()[0])
        # In standard errors. Of a batch those that have nothing to draft gain nothing.
        luck, share = max(self._budget, SAVED / 5), size.drafting[name]
        tokens, lucky = 1 + share * (self._acceptance[name].tokens(luck) - 1)
        if name in self._dropped:
            tokens = lucky = np.eye(1, 1 + source.most)[0]
        # Of what nothing is known of, the first draft tells what reading costs.
        unread = 0.0 if self._is_new(source) else size.unread[name]
        return _Arms(
            tokens,
            lucky / costs * np.exp(luck * errors),
            costs,
            trials,
            errors,
            size.next.best[name],
            size.costs.reading(source.costs, unread),
        )

    def _plan(self, size: _Size, rows: int, even: bool = True, waiting: bool = False) -> _Plan:
        arms = {name: self._arms(size, each) for name, each in self._sources.items()}
        shares = (2 if even else 1) / (2 if waiting else 1)
        floor = promised = MARGIN ** (shares * math.log2(rounded_up(rows)))
        best, speed = dict.fromkeys(self._sources, 0), floor
        main: _Arms | None = None
        for name in self._paid:
            its, length = arms[name], arms[name].best(floor)
            # What must be read first must be gained in the rest of the text.
            rate, lost = float(its.rates[length]), its.reading[1]
            if length and rate > promised and lost < self._remaining * (1 - 1 / max(1.0, rate)):
                promised, speed, main = rate, max(floor, float(its.speeds[length])), its
                best |= {**dict.fromkeys(self._paid, 0), name: length}
        for name, its in arms.items():
            if name not in self._paid:
                best[name] = its.best(speed)
        plan = _Plan(best, best, speed)
        unsure = any(arms[name].errors[1] > 0.3 for name in self._paid or arms)
        if unsure and size.costs.plain_steps < EVERY and not any(best.values()):
            return plan
        return self._with_trials(plan, arms, main)

    def _with_trials(self, plan: _Plan, arms: Mapping[str, _Arms], main: _Arms | None) -> _Plan:
        """Return the plan with trials of arms that may be better, if there are such that the budget
        pays for: the most hopeful one of those that take time, and one of each free source."""
        hoped, trials, paid = MARGIN, dict[str, int](), dict[str, int]()
        for name, its in arms.items():
            length = plan.best[name]
            speed = max(plan.speed, float(its.speeds[length])) if length else plan.speed
            affordable = max(self._budget, self._acceptance[name].undecided or self._budget)
            # Root mean squares of what is known by its logarithm; of a debt, arms must gain it.
            losses = its.losses(speed, its.errors**2)
            hopes = np.where(losses <= affordable, its.hoped / speed, 0.0)
            hopes[[0, length]] = 0.0
            most = int(hopes.argmax())
            if name not in self._paid:
                trials |= {name: most} if hopes[most] > MARGIN else {}
            elif hopes[most] > hoped:
                hoped, paid = float(hopes[most]), {name: most}
        if main is not None and EVERY * (1 - 1 / plan.speed) <= self._budget:
            # Two standard errors: that drafting pays must be sure.
            error = max(main.errors[plan.best[name]] for name in self._paid)
            if math.exp(2 * error) / plan.speed > hoped:
                nobody = dict.fromkeys(plan.best, 0)
                return replace(plan, limits=nobody, trials={"": 0}, plain=EVERY)
        trials |= paid
        others = dict.fromkeys(self._paid, 0) if paid else {}
        return replace(plan, limits={**plan.best, **others, **trials}, trials=trials)


def rounded_up(rows: int) -> int:
    """Return the size of batch whose costs those of so many rows are kept as."""
    return 1 << (rows - 1).bit_length()
