"""Measures the costs of rounds of a pair on this machine, before any text needs them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..draft_length import saved
from ..draft_length.auto_length import Source, rounded_up
from ..draft_length.costs import MOST, TOO_EXPENSIVE, Block, Costs, unknown
from ..draft_length.length import DraftLength
from ..engine.generate import stream_generate
from ..engine.memory import BatchSize
from ..engine.opening import FREE, drafters, make_proposer, pair_key, source
from ..engine.pair import Pair
from ..engine.request import Overrides, Request
from ..engine.scheduler import Scheduler
from ..errors import OptionError
from ..interfaces import Progress, Proposer, ignore_progress
from ..interfaces.results import RoundReport
from ..models.number_format import on_cpu
from ..options import Options
from ..proposers import find
from ..proposers.drafter import Drafter
from ..proposers.lookup import Continuation

LONG, SHORT = 2_048, 128
"""Tokens before the texts, half of the turns behind each: what a round costs depends on its keys,
and what a drafter takes to read them decides whether it drafts. A model with fewer positions takes
half of them; the source of an encoder-decoder is no context."""
OF_BATCH = 8
"""Tokens before each text of a batch, which begins with what reading costs a single text."""
FIRST_LENGTHS = (1, 2, 4, 8, MOST)
"""Draft lengths that are measured at the first use of a pair, the longest too, since a pass over 17
tokens may cost no more than one over two; others are interpolated."""
UNSURE = 0.6
"""Relative standard error of the cost of the longest of them above which they are measured: one
turn suffices, a text alone does not."""
LONGEST = 1_024
"""Tokens of a text that is decoded for this; four turns take 200."""
NOISY = 0.15
"""Relative standard error of a typical cost above which a calibration is worthless."""
LEAST_TURNS = 2
"""Turns that the first survey of a pair must complete, or its costs are dropped: in one turn, no
second round of a length corrects one that stalled."""
SECONDS = 1.0
"""Seconds that the first survey of a pair may take, prefill included; see `calibrate_first`."""
PREFILL_STEP = 16
"""Prompt tokens of one pass of a survey, which can end between two passes."""
clock = time.perf_counter


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure the cost of a round of 1 .. 16 draft tokens, in plain steps, and save it for auto.
    Without a draft, these are rounds of lookup. turns: how often each length is measured. Raises
    OptionError if the target cannot be drafted for, and if the turns differ so much that their
    medians mean little; saved costs then stay."""
    options = Options(max_tokens=sys.maxsize, num_draft="auto", temperature=temperature)
    endless = replace(pair, eos_token_ids=frozenset())
    if not pair.target.rows_agree:
        raise OptionError(
            f"there is nothing to calibrate: {pair.name} is decoded without drafts, because its "
            "passes over several tokens disagree with single ones"
        )
    paid = next((each for each in drafters(pair, options) if each.nbytes), None)
    chosen, repeated = paid or find(FREE, pair), None if paid else Repeated()
    assert chosen is not None, "lookup needs nothing"
    context = len(pair.target.prefix([0] * SHORT)) == SHORT
    prompts = [_room(pair, LONG if context else SHORT), _room(pair, SHORT)]
    sources, lengths = _sources(pair, paid, options), range(1, MOST + 1)
    survey = Survey(sources, lengths)
    alone = replace(options, max_tokens=LONGEST, proposer=chosen.name)
    report = progress or ignore_progress
    report(0, turns)
    for tokens, until in zip(prompts, (turns // 2, turns), strict=True):
        ids = [pair.vocabulary // 2] * tokens
        warm_up(endless, Survey(sources, lengths, turns=1), alone, tokens, proposer=repeated)
        while survey.turns < until:
            survey.begin_text(tokens)
            proposer = repeated or make_proposer([chosen], options, survey)
            given: dict[str, Any] = {"draft_length": survey, "timed": "some"}
            run = stream_generate(endless, ids, options, proposer=proposer, **given)
            for _ in run:
                report(survey.turns, turns)
                if survey.turns == until:
                    break
    report(turns, turns)
    if survey.noise > NOISY:
        raise OptionError(
            f"this machine is too noisy to measure, costs would be off by {survey.noise:.0%}: end "
            "other programs, or give more turns; what was known stays in "
            f"{saved.directory()}"
        )
    saved.memory(pair_key(pair)).add(survey.knowledge)
    return survey.measured


def _room(pair: Pair, tokens: int) -> int:
    """Return how long a prompt is, of so many tokens, that leaves both models half of their
    positions."""
    models = [each for each in (pair.target, pair.draft) if each is not None]
    return min([tokens, *(each.max_length // 2 for each in models if each.max_length is not None)])


def calibrate_first(pair: Pair, options: Options, sizes: Iterable[int] = ()) -> None:
    """Measure roughly what rounds cost if this machine knows little of the pair, and save it, so
    that texts do not have to find out.

    Each size takes at most SECONDS, prefill included. A survey ends before a round that would take
    longer, and at once if it would not complete LEAST_TURNS turns. A few rounds without a prompt
    come first: they show how slow the target is, and whether the draft is too expensive. A device
    that compiles kernels runs each draft length once before the SECONDS begin.

    Args:
        pair: Target and draft.
        options: Options of the text that comes next.
        sizes: Sizes of batches, which are measured in addition to a single sequence.
    Raises:
        OptionError: As `drafters` does.
    """
    if not options.cost_cache or options.num_draft != "auto" or options.regular:
        return
    paid = next((each for each in drafters(pair, options) if each.nbytes), None)
    if paid is None:
        return
    sources, memory = _sources(pair, paid, options), saved.memory(pair_key(pair))
    name = sources[0].costs
    endless = replace(pair, eos_token_ids=frozenset())
    given = Options(
        max_tokens=LONGEST,
        proposer=paid.name,
        num_draft="auto",
        temperature=options.temperature,
        exact=options.exact,
    )
    for size in sorted({1, *sizes}):
        known = saved.costs_of(memory.knowledge, name).get(rounded_up(size))
        if known is not None:
            _, errors = Costs({name: known}).rounds(name, FIRST_LENGTHS[-1])
            if errors[-1] <= UNSURE:
                continue
        scout = scouting(sources, size, memory.knowledge)
        decode(endless, scout, given, 1, size)
        too_expensive = scout.draft_steps > TOO_EXPENSIVE
        if too_expensive:
            memory.add(linear(name, scout.draft_steps, size))
        if too_expensive or not scout.turns:
            # A larger batch takes no less.
            return
        prompt = _room(pair, SHORT if size == 1 else OF_BATCH)
        warm_up(endless, Survey(sources, FIRST_LENGTHS, rows=size, turns=1), given, prompt, size)
        left = scout.seconds if on_cpu() else SECONDS
        survey = first_survey(sources, size, memory.knowledge, seconds=left, after=scout)
        decode(endless, survey, given, prompt, size)
        if survey.turns >= LEAST_TURNS:
            memory.add(survey.knowledge)


def linear(name: str, steps: float, rows: int) -> saved.Knowledge:
    """Return knowledge of a source whose draft tokens take so many plain steps each."""
    mean, covariance = unknown()
    mean[:MOST] = [math.log1p(steps * length) for length in range(1, MOST + 1)]
    return saved.as_knowledge({name: {rounded_up(rows): Block(mean, covariance)}})


class Repeated(Continuation):
    """Proposer that repeats the newest token: it takes as little time as lookup, and always has
    something to propose."""

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        return [committed[-1]] * limit


def _sources(pair: Pair, paid: Drafter | None, options: Options) -> list[Source]:
    free = find(FREE, pair)
    return [source(each, options) for each in (paid, free) if each is not None]


class Survey(DraftLength):
    """DraftLength of a calibration: plain steps, then each of `lengths`, and again. The first plain
    step, which fills the pipeline, is not counted. The first round after the plain steps shows what
    reading the prompt costs the draft as well.

    Attributes:
        turns: Completed turns.
        seconds: What is left of the survey's time.
    """

    PLAIN_STEPS = 6

    def __init__(
        self,
        sources: Sequence[Source],
        lengths: Sequence[int],
        *,
        rows: int = 1,
        known: saved.Knowledge | None = None,
        plain_steps: int = PLAIN_STEPS,
        turns: int = sys.maxsize,
        seconds: float = math.inf,
        slowest: float = math.inf,
        after: Survey | None = None,
    ) -> None:
        """Create a survey.

        Args:
            sources: The first one drafts. The others are free: their rounds cost what the target's
                part of the first one's rounds does. Only the first four rounds are timed in parts,
                since that makes a round of a small pair a fifth longer.
            lengths: Draft lengths of a turn, after the plain steps and one round of length 1.
            rows: Sequences of the batch.
            known: What single texts have taught. A batch begins with it, since a second may not
                suffice for a batch.
            plain_steps: Plain steps of a turn.
            turns: Turns after which the survey is done.
            seconds: Seconds that it may take.
            slowest: Seconds of a plain step above which the survey ends.
            after: An earlier survey, which tells how long the first rounds will take.
        """
        self._sources, self._rows = sources, rows
        self._most_turns, self.seconds, self._slowest = turns, seconds, slowest
        size, names = rounded_up(rows), [each.costs for each in sources]
        alone = {name: saved.costs_of(known or {}, name).get(1, unknown()) for name in names}
        self._costs = Costs({name: block.resized(size) for name, block in alone.items()})
        short = [length for length in lengths if length <= sources[0].most]
        self._turn = [*[0] * plain_steps, 1, *short]
        self._place = self.turns = 0
        self._unread = self._prefill = 0.0
        # Seconds of the newest round at each place of the turn, and of the plain steps.
        self._took = [0.0] * len(self._turn)
        self._plain: list[float] = [] if after is None else list(after._plain)
        self._draft_steps = 1.0 if after is None else max(1.0, after.draft_steps)

    def begin_text(self, prompt: int) -> None:
        """Take note that a text begins, so many tokens of which its first draft has to read. If the
        first round drafts, they are read before."""
        self._unread = 0.0 if self._turn[self._place] else float(prompt)
        self._prefill = 0.0

    def on_prefill(self, seconds: float) -> None:
        """Take note of a pass over a part of the prompts."""
        self.seconds -= seconds
        self._prefill += seconds

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the next length, whatever remains."""
        return self._turn[self._place]

    @property
    def done(self) -> bool:
        """Whether the survey is over, or would not end in time."""
        slow = len(self._plain) > 1 and min(self._plain) > self._slowest
        return slow or self.turns >= self._most_turns or self._needed >= self.seconds

    @property
    def draft_steps(self) -> float:
        """Plain steps per draft token in the fastest round with one draft token, 0 before it. The
        first round also opens the draft's cache, or compiles kernels."""
        pairs = zip(self._turn, self._took, strict=True)
        single = min((took for length, took in pairs if length == 1 and took), default=0.0)
        return max(0.0, single / min(self._plain) - 1) if self._plain else 0.0

    @property
    def _needed(self) -> float:
        """Seconds that the next round takes, or all that the survey must complete if it is to be
        of use. A round that was never run takes at least as long as a plain step."""
        plain = min(self._plain, default=0.0)
        turn = [took or plain for took in self._took]
        turns = min(LEAST_TURNS, self._most_turns) - self.turns
        rest = turns * sum(turn) - sum(turn[: self._place])
        return max(rest, self._expected(plain))

    def _expected(self, plain: float) -> float:
        """Return about how many seconds the next round takes. plain: of a plain step."""
        place, length = self._place, self._turn[self._place]
        if self._took[place] or not length:
            return self._took[place] or plain
        if not self._turn[place - 1]:
            # The draft reads the prompt first.
            return plain * (1 + self._draft_steps) + self._prefill * self._draft_steps
        return self._took[place - 1] * length / self._turn[place - 1]

    def on_round(self, report: RoundReport) -> None:
        """Learn from one round of the length that was chosen; a shorter one is left out."""
        self.seconds -= report.times.total
        if report.drained:
            return
        rows, drafting = len(report.sequences), report.times.draft
        emitted = sum(each.accepted + 1 for each in report.sequences) / rows
        context = sum(len(each.committed) for each in report.sequences) / rows
        if rows == self._rows and self._place and report.size == self._turn[self._place]:
            drafter, *free = self._sources
            its = report.times.total, context
            self._costs.add(drafter.costs, report.size, *its, 0.0 if drafter.free else self._unread)
            if drafting is not None:
                for each in free:
                    self._costs.add(each.costs, report.size, its[0] - drafting, context)
            self._took[self._place] = 0.0 if self._unread > MOST else report.times.total
            if not report.size:
                self._plain.append(report.times.total)
        self._unread = 0.0 if report.size else self._unread + emitted
        self._place = (self._place + 1) % len(self._turn)
        self.turns += self._place == 0

    @property
    def knowledge(self) -> saved.Knowledge:
        """What texts may begin with."""
        names, size = [each.costs for each in self._sources], rounded_up(self._rows)
        return saved.as_knowledge({name: {size: self._costs.block(name)} for name in names})

    @property
    def measured(self) -> dict[int, float]:
        """Costs in plain steps by drafted length."""
        costs, _ = self._costs.rounds(self._sources[0].costs, self._sources[0].most)
        return {n: cost for n, cost in enumerate(costs.tolist()) if n}

    @property
    def noise(self) -> float:
        """Relative standard error of a typical cost."""
        return self._costs.noise / math.sqrt(max(1, self.turns))


def scouting(
    sources: Sequence[Source], rows: int = 1, known: saved.Knowledge | None = None
) -> Survey:
    """Return a survey of a few rounds that tells whether a first survey is of use. It completes its
    turn unless a first survey would not end in time. See Survey for the arguments."""
    slowest = SECONDS / LEAST_TURNS / (Survey.PLAIN_STEPS + 1 + len(FIRST_LENGTHS))
    # A device that compiles kernels may take seconds for it.
    seconds = SECONDS if on_cpu() else math.inf
    limits: dict[str, Any] = {"turns": 1, "seconds": seconds, "slowest": slowest}
    return Survey(sources, (1,), rows=rows, known=known, plain_steps=3, **limits)


def first_survey(
    sources: Sequence[Source],
    rows: int = 1,
    known: saved.Knowledge | None = None,
    *,
    seconds: float = SECONDS,
    after: Survey | None = None,
) -> Survey:
    """Return the calibration before a pair's first text, or its first batch of so many rows. See
    Survey for the arguments."""
    limits: dict[str, Any] = {"turns": 4, "seconds": seconds, "after": after}
    return Survey(sources, FIRST_LENGTHS, rows=rows, known=known, **limits)


def warm_up(
    pair: Pair,
    survey: Survey,
    options: Options,
    prompt: int,
    rows: int = 1,
    proposer: Proposer | None = None,
) -> None:
    """Run each draft length of a survey once before another survey measures them.

    Metal compiles a kernel at its first use, and each number of rows needs other kernels. The CPU
    compiles nothing, and the first round of a length takes no longer there, so nothing is run.
    Arguments as `decode` takes them.
    """
    if not on_cpu():
        decode(pair, survey, options, prompt, rows, proposer)


def decode(
    pair: Pair,
    survey: Survey,
    options: Options,
    prompt: int,
    rows: int = 1,
    proposer: Proposer | None = None,
) -> None:
    """Decode until a survey is done. Do nothing if the pair cannot decode so many rows at once.

    Prompts are read PREFILL_STEP tokens at a time. Reading ends if the next pass would take longer
    than the time that is left.

    Args:
        pair: Target and draft, without end-of-sequence tokens.
        survey: Chooses the draft lengths and measures the rounds.
        options: Options of each sequence.
        prompt: Number of prompt tokens of each sequence.
        rows: Number of sequences that are decoded together.
        proposer: Proposes instead of the one that the options name.
    """
    options = replace(options, prefill_step_size=PREFILL_STEP)
    request = Request([pair.vocabulary // 2] * prompt, options)
    overrides = Overrides(proposer, draft_length=survey, timed="some")
    run = Scheduler(pair, [request] * rows, options, BatchSize(rows), overrides=overrides)
    if run.batch_size < rows:
        return
    survey.begin_text(prompt)
    seconds = 0.0
    while not (run.idle or survey.done) and seconds < survey.seconds:
        began = clock()
        run.read()
        seconds = clock() - began
        survey.on_prefill(seconds)
        run.decode()
