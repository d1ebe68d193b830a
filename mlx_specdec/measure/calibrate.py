"""Measures the costs of rounds of a pair on this machine, before any text needs them."""

from __future__ import annotations

import sys
from dataclasses import replace

from ..draft_length import cache as cost_cache
from ..draft_length.survey import Survey
from ..engine.drafters import cost_key, drafters, make_proposer
from ..engine.generate import stream_generate
from ..engine.pair import Pair
from ..errors import OptionError
from ..interfaces import Progress, ignore_progress
from ..options import Options

NOISY = 0.15
"""Relative standard error of a typical cost above which a calibration is worthless."""


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure the cost of a round of 1 .. 16 draft tokens, in plain steps, and save it for auto.

    turns: how often each length is measured; medians count. Raises OptionError without a draft, and
    where the turns differ so much that their medians mean little; saved costs then stay.
    """
    options = Options(max_tokens=sys.maxsize, num_draft="auto", temperature=temperature)
    endless = replace(pair, eos_token_ids=frozenset())
    chosen = drafters(pair, options)
    paid = tuple(each for each in chosen if each.nbytes)
    if not paid:
        raise OptionError("there is nothing to calibrate without a draft model: name one")
    survey, report = Survey(paid[0].most), progress or ignore_progress
    ids = [pair.vocabulary // 2] * 8
    report(0, turns)
    while survey.turns < turns:
        proposer = make_proposer(paid[:1], options, survey)
        run = stream_generate(endless, ids, options, proposer=proposer, draft_length=survey)
        for _ in run:
            report(survey.turns, turns)
            if survey.turns == turns:
                break
    report(turns, turns)
    if survey.noise > NOISY:
        raise OptionError(
            f"this machine is too noisy to measure, costs would be off by {survey.noise:.0%}: end "
            "other programs, or give more turns; what was known stays in "
            f"{cost_cache.directory()}"
        )
    costs = survey.measured()
    for together in {paid[:1], chosen}:
        key = cost_key(pair, together, paid[0], options)
        cost_cache.write(key, survey.learned())
    return costs
