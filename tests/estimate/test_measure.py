"""Arithmetic of measuring, with a clock that passes of a known price move."""

from __future__ import annotations

import pytest

from mlx_specdec.estimate.measure import FEWEST, SIZES, STEPS, Probe, Wanted, measure

from ..priced import STALL, Clock, PricedModel

EVERYTHING = Wanted(steps=True, drafts=True, sizes=SIZES)


def test_every_kind_of_pass_is_measured_as_what_it_costs() -> None:
    clock = Clock()
    probe = Probe(PricedModel(clock), 10, EVERYTHING, clock)
    measure([probe], turns=4, seconds=1e9, clock=clock)
    timings = probe.timings()
    assert timings.step == pytest.approx(1.25)
    assert timings.draft == pytest.approx(1.25)
    assert timings.passes == pytest.approx({size: 1 + 0.25 * size for size in SIZES})
    assert timings.replays


def test_a_wait_before_the_first_draft_is_paid_once_a_round() -> None:
    clock = Clock()
    model = PricedModel(clock)
    probe = Probe(model, 10, Wanted(drafts=True), clock)
    model.context.begins = 0.5
    measure([probe], turns=2, seconds=1e9, clock=clock)
    timings = probe.timings()
    assert (timings.draft, timings.start) == pytest.approx((1.25, 0.5))


def test_the_spread_is_of_a_typical_sample() -> None:
    clock = Clock()
    model = PricedModel(clock, fixed=1.0, per_row=0.0)
    probe = Probe(model, 4, Wanted(steps=True), clock)
    for fixed in (1.0, 1.1, 1.3, 0.9, 9.0):
        model.context._fixed = fixed
        probe.turn()
    timings = probe.timings()
    assert timings.step == pytest.approx(1.1)
    assert timings.spread == pytest.approx(0.2 / 1.1)


def test_a_stall_moves_no_median_and_the_first_turn_counts_for_nothing() -> None:
    clock = Clock()
    model = PricedModel(clock)
    a_turn = 2 * STEPS + 1 + 2 * len(SIZES)
    # All of the first turn, behind the prompt's own pass, and one pass of the third.
    model.context.stalled = (*range(2, 2 + a_turn), 2 + 2 * a_turn + 3)
    probe = Probe(model, 10, EVERYTHING, clock)
    measure([probe], turns=3, seconds=1e9, clock=clock)
    assert probe.timings().step == pytest.approx(1.25)
    assert max(probe.timings().passes.values()) < STALL


def test_passes_are_fed_as_decoding_feeds_them() -> None:
    clock = Clock()
    model = PricedModel(clock)
    probe = Probe(model, 10, Wanted(steps=True, drafts=True, sizes=(3,)), clock)
    before = model.context.lengths[0]
    assert before == 10 == len(model.prompts[0]) and set(model.prompts[0]) <= set(range(5))
    model.context.passes.clear()
    probe.turn()
    # Plain steps are final, drafted tokens are not, a round's first row is the newest token.
    assert model.context.passes == [(1, 0)] * STEPS + [(1, 1)] * (1 + STEPS) + [(1, 0), (3, 2)]
    assert model.context.lengths[0] == before + STEPS + 2


def test_models_are_measured_in_turns_until_the_time_is_over() -> None:
    clock = Clock()
    order: list[str] = []

    class Named(Probe):
        def turn(self) -> None:
            order.append("slow" if self is slow else "fast")
            super().turn()

    wanted = Wanted(steps=True)
    slow = Named(PricedModel(clock, fixed=10), 4, wanted, clock)
    fast = Named(PricedModel(clock), 4, wanted, clock)
    seen: list[tuple[int, int]] = []
    measure([slow, fast], turns=2, seconds=1e9, clock=clock, progress=lambda *c: seen.append(c))
    assert order == ["slow", "fast"] * 3
    assert seen[0] == (0, 3) and seen[-1] == (3, 3)
    order.clear()
    measure([slow, fast], turns=50, seconds=1.0, clock=clock)
    assert order == ["slow", "fast"] * (FEWEST + 1)


def test_what_is_not_wanted_is_not_measured() -> None:
    clock = Clock()
    model = PricedModel(clock)
    probe = Probe(model, 4, Wanted(drafts=True), clock)
    model.context.passes.clear()
    measure([probe], turns=1, seconds=1e9, clock=clock)
    assert len(model.context.passes) == 2 * (1 + STEPS)
    assert (probe.timings().step, probe.timings().passes) == (0.0, {})
