"""The order of measuring and its end, with a clock that passes of a known price move."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mlx_specdec.measure.passes import SIZES, PassTimer, measure, opened

from ..support.priced import Clock, PricedModel

PROMPT = [1, 2, 3]


def timer(clock: Clock) -> PassTimer:
    model = PricedModel(clock, 1.0, 0.25)
    model.context.rewinding = 0.0
    context = opened(model, PROMPT)
    return PassTimer(context, sizes=SIZES, draft=context, steps=True, clock=clock)


def test_with_time_enough_everything_is_measured_as_often_as_requested() -> None:
    clock = Clock()
    one = timer(clock)
    measure([one], turns=4, deadline=1e9, clock=clock)
    costs = one.costs()
    # The first sample warms up.
    assert costs is not None and costs.samples == 4
    assert costs.passes == pytest.approx({size: 1 + 0.25 * size for size in SIZES})
    assert (costs.step, costs.draft) == pytest.approx((1.25, 1.25))


def test_the_time_is_limited_and_later_passes_are_what_is_left_out() -> None:
    seen: list[set[int]] = []
    for seconds in (0.0, 30.0, 45.0, 60.0, 1000.0):
        clock = Clock()
        one = timer(clock)
        started = clock()
        measure([one], turns=10**9, deadline=started + seconds, clock=clock)
        assert clock() - started <= seconds + 20
        costs = one.costs()
        seen.append(set() if costs is None else set(costs.passes))
    assert seen[0] == set() and seen[-1] == set(SIZES)
    assert all(few <= more for few, more in pairwise(seen)) and len(set(map(len, seen))) > 2


def test_models_are_measured_in_turns() -> None:
    clock = Clock()
    order: list[str] = []

    class Named(PassTimer):
        def time(self, kind: tuple[str, int]) -> None:
            order.append("slow" if self is slow else "fast")
            super().time(kind)

    slow = Named(opened(PricedModel(clock, fixed=10), PROMPT), clock=clock)
    fast = Named(opened(PricedModel(clock), PROMPT), clock=clock)
    seen: list[tuple[int, int]] = []
    measure([slow, fast], turns=2, deadline=1e9, clock=clock, progress=lambda *c: seen.append(c))
    assert order == ["slow", "fast"] * 3
    assert seen == [(done, 3) for done in range(4)]
