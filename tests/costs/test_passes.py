"""Costs of passes, on a clock that passes of a known price move."""

from __future__ import annotations

import pytest

from mlx_specdec.measure.passes import CHAIN, STEPS, PassCosts, PassTimer, opened

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
    assert costs.replays and costs.samples == 2 and costs.spread == 0


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


def test_passes_are_fed_as_decoding_feeds_them() -> None:
    clock = Clock()
    model = PricedModel(clock)
    context = opened(model, PROMPT)
    assert context.lengths == (len(PROMPT),) and model.context.passes == [(len(PROMPT), 0)]
    timer = PassTimer(context, sizes=(3,), draft=context, steps=True, clock=clock)
    model.context.passes.clear()
    timer.turn()
    # Plain steps are final, everything else can be taken back.
    drafts = [(1, 1)] * (1 + CHAIN)
    assert model.context.passes == drafts + [(1, 0)] * STEPS + [(1, 1), (3, 3)]
    assert context.lengths == (len(PROMPT) + STEPS,)


def test_the_spread_is_of_a_typical_sample() -> None:
    clock = Clock()
    model = PricedModel(clock, fixed=1.0, per_row=0.0)
    timer = PassTimer(opened(model, PROMPT), steps=True, clock=clock)
    # The first one warms up.
    for fixed in (7.0, 1.0, 1.1, 1.3, 0.9, 9.0):
        model.context._fixed = fixed
        timer.turn()
    costs = timer.costs()
    assert costs is not None
    assert costs.step == pytest.approx(1.1)
    assert costs.spread == pytest.approx(0.2 / 1.1)


def test_sizes_between_others_count_once_they_were_measured_more_than_once() -> None:
    clock = Clock()
    context = opened(PricedModel(clock), PROMPT)
    timer = PassTimer(context, sizes=(1, 9), between=(4, 6), clock=clock)
    costs = timed(timer, 2)
    assert (list(costs.passes), costs.samples) == ([1, 9], 1)
    timer.turn()
    costs = timed(timer, 1)
    assert (list(costs.passes), costs.samples) == ([1, 9, 4, 6], 3)


def test_a_kind_is_expected_to_take_what_it_took() -> None:
    clock = Clock()
    timer = PassTimer(opened(PricedModel(clock, 0.0, 1.0), PROMPT), sizes=(4, 8), clock=clock)
    assert timer.expected(("pass", 8)) == 0
    timer.time(("pass", 4))
    assert timer.expected(("pass", 4)) == 5 and timer.expected(("pass", 8)) == 10


def test_costs_are_told_in_plain_steps() -> None:
    cost = PassCosts(0.2, {1: 2.0, 3: 4.0}, start=0.5, replays=True).in_steps(2.0, other=0.1)
    assert (cost.draft, cost.start, cost.replays) == (0.1, 0.3, True)
    assert cost.passes == {1: 1.0, 3: 2.0}
    assert PassCosts(None, {1: 1.0}).in_steps(1.0).draft == 0
