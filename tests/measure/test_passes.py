"""Costs of passes, on a clock that passes of a known price move."""

import pytest

from mlx_specdec.measure.passes import CHAIN, PassCosts, PassTimer, opened

from ..support.priced import STALL, Clock, PricedModel

PROMPT = [1, 2, 3]
SIZES = (1, 2, 3, 5, 13)


def timed(timer: PassTimer, turns: int) -> PassCosts:
    timer.turn(turns)
    costs = timer.costs()
    assert costs is not None
    return costs


def test_passes_cost_what_they_cost_behind_a_draft() -> None:
    clock = Clock()
    target, draft = PricedModel(clock, 2.0, 0.5), PricedModel(clock, 0.25, 0.0)
    timer = PassTimer(
        opened(target, PROMPT), sizes=SIZES, draft=opened(draft, PROMPT), steps=True, clock=clock
    )
    draft.context.begins = 0.125
    assert timer.costs() is None
    costs = timed(timer, 3)
    assert (costs.draft, costs.start, costs.step) == pytest.approx((0.25, 0.125, 2.5))
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in SIZES})
    assert costs.samples == 2 and costs.spread == 0


def test_without_a_draft_passes_are_behind_a_step_of_the_target() -> None:
    clock = Clock()
    target = PricedModel(clock, 2.0, 0.5)
    timer = PassTimer(opened(target, PROMPT), sizes=SIZES, clock=clock)
    # What runs first waits for its graph, and no pass behind it does.
    target.context.begins = 0.5
    costs = timed(timer, 2)
    assert costs.draft is None and costs.step == costs.start == 0
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in SIZES})


def test_everything_but_plain_steps_is_taken_back_and_a_stall_moves_no_median() -> None:
    clock = Clock()
    target, draft = PricedModel(clock), PricedModel(clock)
    timer = PassTimer(opened(target, PROMPT), sizes=SIZES, draft=opened(draft, PROMPT), clock=clock)
    held = target.context.lengths, draft.context.lengths
    # All of the first turn warms up, and one later pass of each model stalls.
    a_turn = len(SIZES)
    target.context.stalled = (*range(2, 2 + a_turn), 2 + a_turn + 2)
    a_turn = 1 + CHAIN + len(SIZES)
    draft.context.stalled = (*range(2, 2 + a_turn), 2 + a_turn + 3)
    costs = timed(timer, 4)
    assert (target.context.lengths, draft.context.lengths) == held
    assert costs.draft is not None
    assert max(costs.draft, costs.start, *costs.passes.values()) < STALL
