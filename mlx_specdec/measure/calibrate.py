"""Measure what rounds of a pair cost on this machine, before a completion needs to know it."""

import math
import time
from collections.abc import Iterable, Sequence

from ..draft_length import saved
from ..draft_length.auto import MOST, TOO_EXPENSIVE, AutoLength, CostTable, Source
from ..draft_length.length import DraftLength
from ..draft_length.saved import Memory
from ..engine.memory import BatchSize
from ..engine.opening import FREE, drafters, pair_key, source
from ..engine.pair import Pair
from ..engine.request import Overrides, Request
from ..engine.scheduler import Scheduler
from ..errors import OptionError
from ..interfaces import Progress, ignore_progress
from ..interfaces.results import RoundReport
from ..models.number_format import on_cpu
from ..options import Options
from ..proposers import find
from ..proposers.lookup import Continuation

PLAIN = (0, 0, 0, 1)
"""Plain steps of a turn. The first one fills the pipeline, the last one empties it, and both are
not timed."""
FIRST_TURN = (*PLAIN, 1, 1, 1, 2, 4, 8, MOST)
"""Draft lengths of a turn before a first completion. A turn takes about 20 plain steps. The first
round of each length is not timed, so three with a single draft token show whether drafting is too
expensive."""
SECONDS, SHARE, LEAST = 1.0, 0.05, 20
"""Bounds of a calibration before a first completion. It takes at most SECONDS seconds, and at most
SHARE of the plain steps of the work at hand. It is left out if that is below LEAST plain steps."""
TURNS = 4
"""Turns of a calibration before a first completion, if there is time for them."""
PROMPT, TOKENS = 16, 1_024
"""Tokens of each sequence that is decoded for this: of its prompt, and at most after it."""


class Repeated(Continuation):
    """A proposer that repeats the newest token. It always proposes, and as fast as lookup."""

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        return [committed[-1]] * limit


class Survey(DraftLength):
    """Draft lengths in turn, which `auto` times. It ends with plain steps."""

    def __init__(self, auto: AutoLength, lengths: Sequence[int]) -> None:
        self.auto, self.left = auto, list(lengths)

    def choose(self, remaining: int, rows: int = 1) -> int:
        return min(self.left[0] if self.left else 0, remaining - 1)

    def on_round(self, report: RoundReport) -> None:
        """Time a round."""
        self.auto.time(report)
        del self.left[:1]


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure the cost ratio of rounds with 1 to 16 draft tokens, and save it for `auto`.

    Args:
        pair: The target and its draft. Without a draft, rounds of lookup are measured.
        temperature: The temperature of the completions.
        turns: How often each draft length is measured, at least 2.
        progress: Called with the numbers of turns that are done and that there are.
    Raises:
        OptionError: The target is decoded without drafts.
    """
    if not pair.target.rows_agree:
        raise OptionError(
            f"there is nothing to calibrate: {pair.name} is decoded without drafts, because its "
            "passes over several tokens disagree with single ones"
        )
    options, scratch = Options(num_draft="auto", temperature=temperature), Memory()
    for turn in range(turns + 1):  # the first one is not timed
        (progress or ignore_progress)(min(turn, turns), turns)
        _decode(pair, options, scratch, (*PLAIN, *range(1, MOST + 1)))
    _keep(pair, scratch)
    drafter = _source(pair, options)
    costs = CostTable(scratch, 1, 0, [drafter.costs]).costs(drafter)
    return dict(list(enumerate(costs))[1:])


def calibrate_first(
    pair: Pair, options: Options, sizes: Iterable[int] = (), tokens: float = math.inf
) -> None:
    """Measure roughly what rounds cost, if nothing is known of the pair on this machine.

    A calibration takes at most SECONDS, and SHARE of the work at hand. On a device that compiles
    kernels, each draft length runs once before that.

    Args:
        pair: The target and its draft.
        options: Options of the completion that comes next.
        sizes: Numbers of sequences that are decoded together. A single sequence is measured too if
            the work has no end.
        tokens: How many tokens all completions may have.
    Raises:
        OptionError: As `drafters` does.
    """
    if not options.cost_cache or options.num_draft != "auto" or options.regular:
        return
    drafter = _source(pair, options)
    for rows in sorted({1, *sizes} if math.isinf(tokens) else {*sizes} or {1}):
        rounded, steps = 1 << (rows - 1).bit_length(), SHARE * tokens / rows
        known = CostTable(saved.memory(pair_key(pair)), rounded, 0, [drafter.costs])
        if drafter.free or steps < LEAST or known.entry(drafter.costs, 1)[1] >= 2:
            continue
        scratch, bounds, turn = Memory(), (SECONDS, steps), 0
        if not on_cpu():
            _decode(pair, options, scratch, FIRST_TURN, rows)
        began = time.perf_counter()
        while turn < TURNS and _decode(pair, options, scratch, FIRST_TURN, rows, began, *bounds):
            turn += 1
        if CostTable(scratch, rounded, 0, [drafter.costs]).known(drafter.costs):
            _keep(pair, scratch)


def _source(pair: Pair, options: Options) -> Source:
    """Return the proposer with weights, or lookup if there is none."""
    paid = (drafter for drafter in drafters(pair, options) if drafter.nbytes)
    chosen = next(paid, None) or find(FREE, pair)
    assert chosen is not None, "lookup needs nothing"
    return source(chosen, options)


def _keep(pair: Pair, scratch: Memory) -> None:
    """Save the costs that were measured."""
    memory = saved.memory(pair_key(pair))
    names = [name for name in scratch.entries if not name.startswith("acceptance")]
    memory.entries |= {name: scratch.entries[name] for name in names}
    memory.save()


def _decode(
    pair: Pair,
    options: Options,
    scratch: Memory,
    lengths: Sequence[int],
    rows: int = 1,
    began: float = math.inf,
    seconds: float = math.inf,
    steps: float = math.inf,
) -> bool:
    """Run the draft lengths of one turn, and return whether all of them ran.

    Args:
        scratch: Receives the costs.
        rows: Number of sequences that are decoded together.
        began: Time on the performance counter at which the calibration began.
        seconds, steps: Most seconds and most plain steps that the calibration may take."""
    drafter = _source(pair, options)
    survey = Survey(AutoLength([drafter], scratch), lengths)
    turn = Options(
        max_tokens=TOKENS,
        proposer=None if drafter.free else drafter.name,
        num_draft="auto",
        temperature=options.temperature,
        exact=options.exact,
    )
    request = Request([pair.vocabulary // 2] * PROMPT, turn, ignore_eos=True)
    overrides = Overrides(Repeated() if drafter.free else None, draft_length=survey)
    run = Scheduler(pair, [request] * rows, turn, BatchSize(rows), overrides=overrides)
    table = survey.auto.size(rows).table
    while survey.left and run.batch_size >= rows and not run.idle:
        plain, costs = table.seconds if table.state[1] else 0.0, table.costs(drafter)
        expected = time.perf_counter() - began + plain * costs[survey.left[0]]
        expensive = table.known(drafter.costs) and costs[1] > 1 + TOO_EXPENSIVE
        if expensive or expected > min(seconds, steps * plain if plain else seconds):
            break
        run.read()
        run.decode()
    return not survey.left
