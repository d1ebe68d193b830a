"""The number of drafted tokens that brings most tokens a second, learned from rounds.

An arm is a source and a length; a plain step is an arm of all sources. The arm with the most
expected tokens for its cost is taken; arms that might be better are tried, as far as a budget of
time goes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..interfaces import Prices
from ..interfaces.rounds import RoundReport, SequenceRound, is_drained
from .acceptance import MEMORY, Acceptance
from .costs import DOUBT, MOST, Block, Costs, unknown
from .length import Change
from .saved import Knowledge

SHARE = 0.01
"""Of all time, what trials may lose."""
SAVED = 3.0
"""Plain steps of the budget that texts can save for others, or owe them; two thirds of it to begin
with. For each saved step arms may be one standard error better than they seem."""
MARGIN = 1.03
"""What an arm must promise over the current one; plain steps of a batch are preferred by as much
for each doubling of its rows, which end apart and leave places empty."""
PLAIN_STEPS = 3
"""In a row, where they are measured: the first one fills the pipeline and does not count."""
ENCODED = 16
"""Tokens that an unread prompt counts for at least: that of an encoder is not seen here."""
ALWAYS, EVERY = 24, 4
"""Plans are made in the first rounds of a text always, then in one of four: they take time."""


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
class Plan:
    """What the next rounds may draft. best: by source, 0 for none. limits: the same but for a
    trial. speed: tokens that the best arm brings in the time of a plain step. trial: the arm that
    is tried. plain: steps of a trial of plain decoding that are left."""

    best: Mapping[str, int]
    limits: Mapping[str, int]
    speed: float = 1.0
    trial: tuple[str, int] | None = None
    plain: int = 0


@dataclass
class _Size:
    """What belongs to batches of one size. drafting: share of the rows that drafted, by source.
    unread: tokens a row that the source has not read. arriving: those of newcomers, a round.
    stretch: plain steps since the last draft."""

    costs: Costs
    plan: Plan
    drafting: dict[str, float]
    unread: dict[str, float]
    arriving: float = 0.0
    rounds: int = 0
    stretch: int = 0


@dataclass(frozen=True)
class _Arms:
    """Of one source, by length from 0: expected tokens, the same with luck, logarithms of costs
    and their errors."""

    tokens: np.ndarray
    lucky: np.ndarray
    costs: np.ndarray
    errors: np.ndarray
    current: int
    reading: float = field(default=0.0)

    @property
    def rates(self) -> np.ndarray:
        """Tokens a plain step's time; what is known badly must promise more."""
        return self.tokens / np.exp(self.costs + self.errors)

    def speed(self, length: int) -> float:
        return float(self.tokens[length] / math.exp(self.costs[length]))

    def best(self, instead: float) -> int:
        """Return the best length, where a round without this source has the rate `instead`."""
        rates = self.rates
        rates[0] = instead
        best = int(rates.argmax())
        return self.current if best and rates[best] <= MARGIN * rates[self.current] else best


class AutoLength:
    """DraftLength for all that may draft for a sequence or a batch.

    sources: in the order in which they propose; of those that are not free one at a time does.
    knowledge: of earlier texts; without any, a text begins with PLAIN_STEPS.
    """

    def __init__(
        self, sources: Sequence[Source] = (Source(),), knowledge: Knowledge | None = None
    ) -> None:
        knowledge = knowledge or Knowledge()
        self._sources = {each.name: each for each in sources}
        self._weighted = tuple(each.name for each in sources if not each.free)
        self._known = {each.costs: knowledge.costs.get(each.costs, {}) for each in sources}
        self._acceptance = {
            each.name: Acceptance(each.most, knowledge.counts.get(each.text)) for each in sources
        }
        # How far drafts get that may end sooner than asked: until some do, none does.
        self._reached = {
            each.name: Acceptance(each.most, np.full((2, each.most), 1e3))
            for each in sources
            if each.stops
        }
        self._budget = SAVED * 2 / 3 if knowledge.budget is None else knowledge.budget
        self._sizes: dict[int, _Size] = {}
        self._rounds = 0
        self._changes: deque[Change] = deque(maxlen=1000)

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen for whom and when, single trials left out."""
        return tuple(self._changes)

    @property
    def knowledge(self) -> Knowledge:
        """What later texts may begin with."""
        names = {each.costs for each in self._sources.values()}
        return Knowledge(
            costs={n: {r: s.costs.block(n) for r, s in self._sizes.items()} for n in names},
            counts={s.text: self._acceptance[n].counts for n, s in self._sources.items()},
            budget=self._budget,
        )

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the longest draft that any source may make."""
        return max(0, min(max(self._size(rows).plan.limits.values()), remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named source may draft, of at most `most`."""
        return min(most, self._size(rows).plan.limits[self._drafter(name).name])

    def eager(self, name: str) -> bool:
        """Whether the source should read a text's prompt beside the target: a draft is wanted soon,
        or nothing is known."""
        source = self._drafter(name)
        known = self._known[source.costs] or self._acceptance[source.name].counts.any()
        return not known or self._size(1).plan.limits[source.name] > 0

    def prices(self, name: str) -> Prices | None:
        """What rounds of the source cost one sequence; None before that is known, and in trials,
        whose lengths stand."""
        size, source = self._size(1), self._drafter(name)
        if size.plan.trial or not (size.costs.plain_steps and size.plan.best[source.name]):
            return None
        costs, _ = size.costs.logarithms(source.costs, source.most)
        plain = size.costs.plain
        return Prices((plain * np.exp(costs)).tolist(), plain / size.plan.speed)

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and plan the next one."""
        rows = len(report.sequences)
        size = self._sizes.setdefault(_rounded_up(rows), self._size(rows))
        self._meet(size, report.sequences)
        if is_drained(report):
            # The next plain step fills the pipeline again.
            size.stretch = 0
        else:
            self._heed(size, report)
        emitted = sum(each.accepted + 1 for each in report.sequences) / rows
        for name in self._weighted:
            has_read = report.size and name == self._drafter(report.source).name
            size.unread[name] = 0.0 if has_read else size.unread[name] + emitted

    def _heed(self, size: _Size, report: RoundReport) -> None:
        self._rounds += 1
        size.rounds += 1
        for acceptance in self._acceptance.values():
            acceptance.fade()
        self._learn(size, report)
        plan = size.plan
        self._pay(size, report)
        if plan.plain > 1 and not report.size:
            size.plan = replace(plan, plain=plan.plain - 1)
        elif size.rounds < ALWAYS or size.rounds % EVERY == 0 or plan.trial:
            size.plan = self._plan(size, len(report.sequences))
            self._note(plan, size)

    def _drafter(self, name: str) -> Source:
        """The source of that name; rounds name none where there is one, and drafters whose lengths
        a caller has passed are none of its sources."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def _meet(self, size: _Size, sequences: Sequence[SequenceRound]) -> None:
        """Count what rows bring that is not read."""
        rows = len(sequences)
        prompts = [
            max(ENCODED, len(each.committed) - each.accepted - 1)
            for each in sequences
            if each.position == 0
        ]
        if rows > 1:
            size.arriving += (sum(prompts) / rows - size.arriving) / MEMORY
        for name in self._weighted if prompts else ():
            stay = (rows - len(prompts)) * size.unread[name]
            has_read = rows == 1 and self.eager(name)
            size.unread[name] = 0.0 if has_read else (stay + sum(prompts)) / rows

    def _learn(self, size: _Size, report: RoundReport) -> None:
        rows, drafted, seconds = len(report.sequences), report.size, report.times.total
        context = sum(len(each.committed) for each in report.sequences) / rows
        source = self._drafter(report.source)
        if drafted:
            size.stretch = 0
            for each in report.sequences:
                if each.drafted:
                    self._judge(each, self._sources.get(each.source, source), size.plan)
            share = sum(each.drafted > 0 for each in report.sequences) / rows
            size.drafting[source.name] += (share - size.drafting[source.name]) / 8
            if drafted <= MOST:
                unread = size.unread[source.name]
                size.costs.add(source.costs, drafted, seconds, context, unread)
        else:
            size.stretch += 1
            if size.stretch > 1 or size.rounds == 1:
                size.costs.add_plain(seconds, context)

    def _judge(self, its: SequenceRound, source: Source, plan: Plan) -> None:
        asked = plan.limits[source.name]
        # Drafts of a text's last round end with the text.
        stopped = source.stops and its.drafted < asked and not its.ended
        # A token at which a draft ended counts as one that would not have stayed.
        self._acceptance[source.name].add(its.drafted + stopped, its.accepted)
        if source.stops and plan.trial is None and not its.ended:
            self._reached[source.name].add(asked, its.drafted)

    def _pay(self, size: _Size, report: RoundReport) -> None:
        """Earn a share of the round's time, and pay for a trial, which may also gain."""
        took = report.times.total / size.costs.plain if size.costs.paced else 1.0
        self._budget = min(self._budget + SHARE * min(took, 5.0), SAVED)
        plan = size.plan
        if plan.trial is not None and report.size == plan.trial[1]:
            lost = took - (report.accepted / len(report.sequences) + 1) / plan.speed
            self._budget = max(self._budget - max(0.0, min(lost, SAVED * 2 / 3)), -SAVED)

    def _size(self, rows: int) -> _Size:
        """Return what is known of batches of such a size; of a new one from the nearest size."""
        rows = _rounded_up(rows)
        if rows in self._sizes:
            return self._sizes[rows]
        blocks = {name: self._block(name, rows) for name in self._known}
        nobody = dict.fromkeys(self._sources, 0)
        size = _Size(
            Costs(blocks),
            Plan(nobody, nobody),
            drafting=dict.fromkeys(self._sources, 1.0),
            unread=dict.fromkeys(self._sources, 0.0),
        )
        size.plan = self._plan(size, rows)
        return size

    def _block(self, name: str, rows: int) -> Block:
        known = {**self._known[name], **{r: s.costs.block(name) for r, s in self._sizes.items()}}
        if not known:
            return unknown()
        apart = {size: abs(math.log2(size / rows)) for size in known}
        nearest = min(known, key=lambda size: (apart[size], size))
        return known[nearest].doubted(DOUBT * apart[nearest])

    def _arms(self, size: _Size, source: Source, luck: float) -> _Arms:
        acceptance, name = self._acceptance[source.name], source.name
        costs, errors = size.costs.logarithms(source.costs, source.most)
        if source.stops:
            costs = np.log(_ending_sooner(np.exp(costs), self._reached[name].tokens()))
        reading = 0.0
        if not source.free:
            reading = size.costs.reading(source.costs, size.unread[name])
            if size.arriving:
                arriving = size.costs.reading(source.costs, size.arriving)
                costs[1:] = np.log(np.exp(costs[1:]) + arriving)
        # Of a batch those that have nothing to draft gain nothing.
        share = size.drafting[name]
        return _Arms(
            1 + share * (acceptance.tokens() - 1),
            1 + share * (acceptance.tokens(luck) - 1),
            costs,
            errors,
            size.plan.best[name],
            reading,
        )

    def _plan(self, size: _Size, rows: int) -> Plan:
        luck = max(0.0, self._budget)
        arms = {name: self._arms(size, each, luck) for name, each in self._sources.items()}
        floor = MARGIN ** math.log2(_rounded_up(rows))
        best = dict.fromkeys(self._sources, 0)
        speed, main = 1.0, None
        promised = floor
        for name in self._weighted:
            its = arms[name]
            length = its.best(floor)
            rate = its.rates[length] * (MARGIN if its.current else 1.0)
            if length and rate > promised:
                promised, main = rate, name
        if main is not None:
            best[main] = arms[main].best(floor)
            speed = max(1.0, arms[main].speed(best[main]))
        for name, its in arms.items():
            if name not in self._weighted:
                best[name] = its.best(max(floor, speed))
        plan = Plan(best, best, speed)
        unsure = any(its.errors[1] > 0.3 for its in arms.values())
        if unsure and size.costs.plain_steps < PLAIN_STEPS and not any(best.values()):
            return plan
        return self._with_trial(plan, arms, main, luck)

    def _with_trial(
        self, plan: Plan, arms: Mapping[str, _Arms], main: str | None, luck: float
    ) -> Plan:
        """Return the plan with a trial, of the arm that may be better by most, if there is one that
        the budget pays for."""
        hoped, trial = MARGIN, None
        cheapest, probe = math.inf, None
        full = self._budget >= 0.99 * SAVED
        affordable = 2 * SAVED if full else self._budget
        for name, its in arms.items():
            length = plan.best[name]
            speed = max(plan.speed, its.speed(length)) if length else plan.speed
            hopes = its.lucky / np.exp(its.costs - luck * its.errors) / speed
            losses = np.exp(its.costs + its.errors) + its.reading - its.tokens / speed
            if not self._acceptance[name].counts.any():
                # Whoever was never heard is heard soon.
                losses[1] = min(losses[1], 0.0)
            hopes[losses > affordable] = 0.0
            hopes[[0, length]] = 0.0
            if full and main is None and name in self._weighted:
                # Nothing is gained by saving more: the arm that buys most verdicts.
                prices = np.maximum(losses[1:], 0.1) / its.tokens[:-1]
                n = int(prices.argmin()) + 1
                if losses[n] <= affordable and prices[n - 1] < cheapest:
                    cheapest, probe = float(prices[n - 1]), (name, n)
            if hopes.max() > hoped:
                hoped, trial = hopes.max(), (name, int(hopes.argmax()))
        if main is not None:
            # Two standard errors: that drafting pays must be sure.
            hope = math.exp(2 * arms[main].errors[plan.best[main]]) / plan.speed
            if hope > hoped and PLAIN_STEPS * (1 - 1 / plan.speed) <= self._budget:
                nobody = dict.fromkeys(plan.best, 0)
                return replace(plan, limits=nobody, trial=("", 0), plain=PLAIN_STEPS)
        trial = trial or probe
        if trial is None:
            return plan
        name, length = trial
        others = dict.fromkeys(self._weighted, 0) if name in self._weighted else {}
        return replace(plan, limits={**plan.best, **others, name: length}, trial=trial)

    def _note(self, before: Plan, size: _Size) -> None:
        """Record what is drafted from now on."""
        for name, length in size.plan.best.items():
            if length != before.best[name]:
                its = self._arms(size, self._sources[name], 0.0)
                source = name if len(self._sources) > 1 else ""
                self._changes.append(Change(self._rounds, length, its.speed(length), source))


def _rounded_up(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _ending_sooner(costs: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Return what rounds of each length cost where some drafts end sooner. reached: 1 and how long
    drafts get, for each length; all have a first token."""
    shares = np.diff(reached)
    rises = np.diff(costs[1:]) * shares[1:] / shares[0]
    return np.concatenate((costs[:1], costs[1] + np.cumsum(np.insert(rises, 0, 0.0))))
