"""Measure what rounds of a pair cost on this machine, so that `--num-draft auto` begins with it."""

from collections.abc import Sequence
from dataclasses import replace

from ..draft_length import saved
from ..draft_length.auto import MOST, AutoLength
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
from ..options import Options
from ..proposers import find
from ..proposers.lookup import Continuation

TURN = (0, 0, 0, 0, 1, 1, *range(1, MOST + 1))
"""Draft lengths of a turn. The first plain step fills the pipeline, and the last one empties it in
place of the first draft. The second draft includes the prefill of the proposer."""
PROMPT, TOKENS = 16, 1_024
"""Tokens of the prompt, and the most tokens of a completion, which a turn fits into."""


class Repeated(Continuation):
    """A proposer that repeats the newest token. It always proposes, and as fast as lookup."""

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        return [committed[-1]] * limit


class Survey(DraftLength):
    """The draft lengths of a turn, whose rounds `auto` learns from. After it, decoding is plain."""

    def __init__(self, auto: AutoLength) -> None:
        self._auto, self.left = auto, list(TURN)

    def choose(self, remaining: int, rows: int = 1) -> int:
        return min(self.left[0] if self.left else 0, remaining - 1)

    def on_round(self, report: RoundReport) -> None:
        """Time a round."""
        self._auto.time(report)
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
    Returns:
        The cost ratio by draft length.
    Raises:
        OptionError: The target is decoded without drafts.
    """
    if not pair.target.rows_agree:
        raise OptionError(
            f"there is nothing to calibrate: {pair.name} is decoded without drafts, because its "
            "passes over several tokens disagree with single ones"
        )
    options = Options(num_draft="auto", temperature=temperature, max_tokens=TOKENS)
    paid = (drafter for drafter in drafters(pair, options) if drafter.nbytes)
    drafter = next(paid, None) or find(FREE, pair)
    assert drafter is not None, "lookup needs nothing"
    proposer = None if drafter.nbytes else Repeated()
    options = replace(options, proposer=drafter.name if drafter.nbytes else None)
    measured = AutoLength([source(drafter, options)], scratch := Memory())
    for turn in range(turns + 1):  # the first one is not timed
        (progress or ignore_progress)(min(turn, turns), turns)
        survey = Survey(measured)
        request = Request([pair.vocabulary // 2] * PROMPT, options, ignore_eos=True)
        overrides = Overrides(proposer, draft_length=survey)
        run = Scheduler(pair, [request], options, BatchSize(1), overrides=overrides)
        while survey.left and not run.idle:
            run.read()
            run.decode()
    memory = saved.memory(pair_key(pair))
    memory.entries |= {
        name: numbers for name, numbers in scratch.entries.items() if "acceptance" not in name
    }
    memory.tables.clear()
    memory.save()
    table = measured.size(1).table
    table.fit()
    return dict(list(enumerate(table.ratios[source(drafter, options).costs]))[1:])
