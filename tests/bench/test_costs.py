"""Costs of passes, on a clock that passes of a known price move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.bench.costs import CHAIN, EVERY, PassTimer

from ..priced import STALL, Clock, PricedModel

PROMPT = [1, 2, 3]


def pair(target: PricedModel, draft: PricedModel | None) -> Any:
    """What a timer needs of a pair."""
    return SimpleNamespace(target=target, draft=draft, translation=None)


def test_passes_cost_what_they_cost_behind_a_draft() -> None:
    clock = Clock()
    target, draft = PricedModel(clock, 2.0, 0.5), PricedModel(clock, 0.25, 0.0)
    timer = PassTimer(pair(target, draft), PROMPT, [3, 12, "auto"], clock)
    draft.context.begins = 0.125
    assert timer.costs() is None
    timer.turn(2)
    costs = timer.costs()
    assert costs is not None
    assert (costs.draft, costs.start) == pytest.approx((0.25, 0.125))
    rows = [*range(1, EVERY + 1), 13]
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in rows})


def test_without_a_draft_passes_are_behind_a_step_of_the_target() -> None:
    clock = Clock()
    target = PricedModel(clock, 2.0, 0.5)
    timer = PassTimer(pair(target, None), PROMPT, [], clock)
    timer.turn()
    costs = timer.costs()
    assert costs is not None and costs.draft is None
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in range(1, EVERY + 1)})


def test_everything_timed_is_taken_back_and_a_stall_moves_no_median() -> None:
    clock = Clock()
    target, draft = PricedModel(clock), PricedModel(clock)
    timer = PassTimer(pair(target, draft), PROMPT, [], clock)
    held = target.context.lengths, draft.context.lengths
    target.context.stalled = (len(target.context.passes) + 2,)
    draft.context.stalled = (len(draft.context.passes) + CHAIN,)
    timer.turn(3)
    assert (target.context.lengths, draft.context.lengths) == held
    costs = timer.costs()
    assert costs is not None and costs.draft is not None
    assert max(costs.draft, costs.start, *costs.passes.values()) < STALL
