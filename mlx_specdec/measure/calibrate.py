"""Measures the costs of rounds of a pair on this machine, before any text needs them."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..draft_length import saved
from ..draft_length.auto_length import Source
from ..draft_length.costs import MOST, Costs, unknown
from ..draft_length.length import Change
from ..engine.generate import stream_generate
from ..engine.opening import drafters, make_proposer, pair_key, source
from ..engine.pair import Pair
from ..errors import OptionError
from ..interfaces import Progress, ignore_progress
from ..interfaces.results import RoundReport
from ..options import Options

PROMPTS = (2_048, 8)
"""Tokens before the texts, half of the turns behind each: what a round costs depends on its keys. A
model with fewer positions takes half of them; the source of an encoder-decoder is no context."""
FIRST_LENGTHS = (1, 2, 4, 8, MOST)
"""Draft lengths that are measured at the first use of a pair, the longest too, since a pass over 17
tokens may cost no more than one over two; others are interpolated."""
UNSURE = 0.6
"""Relative standard error of the cost of the longest of them above which they are measured: one
turn suffices, a text alone does not."""
NOISY = 0.15
"""Relative standard error of a typical cost above which a calibration is worthless."""


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure the cost of a round of 1 .. 16 draft tokens, in plain steps, and save it for auto.
    turns: how often each length is measured. Raises OptionError without a draft, and where the
    turns differ so much that their medians mean little; saved costs then stay."""
    options = Options(max_tokens=sys.maxsize, num_draft="auto", temperature=temperature)
    endless = replace(pair, eos_token_ids=frozenset())
    chosen = drafters(pair, options)
    paid = tuple(each for each in chosen if each.nbytes)
    if not paid:
        raise OptionError("there is nothing to calibrate without a draft model: name one")
    survey = Survey(source(paid[0], options), range(1, MOST + 1))
    report = progress or ignore_progress
    report(0, turns)
    for tokens, until in zip(_prompts(pair), (turns // 2, turns), strict=True):
        ids = [pair.vocabulary // 2] * tokens
        while survey.turns < until:
            proposer = make_proposer(paid[:1], options, survey)
            run = stream_generate(endless, ids, options, proposer=proposer, draft_length=survey)
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


def _prompts(pair: Pair) -> tuple[int, int]:
    """Return how long the prompts are, the longer one first."""
    longer, short = PROMPTS
    if len(pair.target.prefix([0] * longer)) < longer:
        return short, short
    models = [each for each in (pair.target, pair.draft) if each is not None]
    rooms = [each.max_length // 2 for each in models if each.max_length is not None]
    return max(short, min([longer, *rooms])), short


def calibrate_first(pair: Pair, options: Options) -> None:
    """Measure roughly what rounds of a pair cost where this machine knows little of it, and save
    it, so that texts do not have to find out. Raises OptionError as `drafters` does."""
    if not options.cost_cache or options.num_draft != "auto" or options.regular:
        return
    paid = next((each for each in drafters(pair, options) if each.nbytes), None)
    if paid is None:
        return
    its = source(paid, options)
    known = saved.memory(pair_key(pair)).knowledge.costs.get(its.costs, {}).get(1)
    if known is not None:
        _, errors = Costs({its.costs: known}).logarithms(its.costs, FIRST_LENGTHS[-1])
        if errors[-1] <= UNSURE:
            return
    survey = first_survey(its)
    plain = Options(max_tokens=sys.maxsize, temperature=options.temperature)
    run = stream_generate(
        replace(pair, eos_token_ids=frozenset()),
        [pair.vocabulary // 2] * 8,
        plain,
        proposer=make_proposer([paid], plain, survey),
        draft_length=survey,
    )
    for _ in run:
        if survey.done:
            break
    saved.memory(pair_key(pair)).add(survey.knowledge)


class Survey:
    """DraftLength of a calibration: plain steps, then each of `lengths`, and again. Not counted are
    the first plain step, which fills the pipeline, and the first round after it, which pays for
    what the draft has not read. It is done after so many turns, or so many seconds of rounds."""

    PLAIN_STEPS = 6
    changes: Sequence[Change] = ()

    def __init__(
        self,
        source: Source,
        lengths: Sequence[int],
        *,
        turns: int = sys.maxsize,
        seconds: float = math.inf,
    ) -> None:
        self._source = source
        self._most_turns, self._seconds = turns, seconds
        self._costs = Costs({source.costs: unknown()})
        short = [length for length in lengths if length <= source.most]
        self._turn = [*[0] * self.PLAIN_STEPS, 1, *short]
        self._ignored = (0, self.PLAIN_STEPS)
        self._place = 0
        self.turns = 0

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the next length, whatever remains."""
        return self._turn[self._place]

    @property
    def done(self) -> bool:
        return self.turns >= self._most_turns or self._seconds <= 0

    def on_round(self, report: RoundReport) -> None:
        """Learn from one round of the length that was chosen; a shorter one is left out."""
        self._seconds -= report.times.total
        if report.drained:
            return
        if self._place not in self._ignored and report.size == self._turn[self._place]:
            [sequence], seconds = report.sequences, report.times.total
            context = len(sequence.committed)
            self._costs.add(self._source.costs, report.size, seconds, context)
        self._place = (self._place + 1) % len(self._turn)
        self.turns += self._place == 0

    @property
    def knowledge(self) -> saved.Knowledge:
        """What texts may begin with."""
        return saved.Knowledge({self._source.costs: {1: self._costs.block(self._source.costs)}})

    @property
    def measured(self) -> dict[int, float]:
        """Costs in plain steps by drafted length."""
        costs, _ = self._costs.logarithms(self._source.costs, self._source.most)
        return {n: math.exp(cost) for n, cost in enumerate(costs) if n}

    @property
    def noise(self) -> float:
        """Relative standard error of a typical cost."""
        return self._costs.noise / math.sqrt(max(1, self.turns))


def first_survey(its: Source, seconds: float = 1.0) -> Survey:
    """Return the calibration before a pair's first text, which takes so many seconds."""
    return Survey(its, FIRST_LENGTHS, turns=4, seconds=seconds)
