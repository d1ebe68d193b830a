"""The order of measuring and its end, with a clock that passes of a known price move."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mlx_specdec.measure.passes import (
    FIRST_SIZES,
    NEEDED,
    SIZES_BETWEEN,
    PassTimer,
    measure,
    opened,
)

from ..support.priced import Clock, PricedModel

PROMPT = [1, 2, 3]
SIZES = sorted((*FIRST_SIZES, *SIZES_BETWEEN))


def timer(clock: Clock, fixed: float = 1.0, per_row: float = 0.25) -> PassTimer:
    model = PricedModel(clock, fixed, per_row)
    model.context.rewinding = 0.0
    context = opened(model, PROMPT)
    sizes = {"sizes": FIRST_SIZES, "between": SIZES_BETWEEN}
    return PassTimer(context, **sizes, draft=context, steps=True, clock=clock)


def measured(one: PassTimer, seconds: float, turns: int = 9) -> tuple[list[int], int, float]:
    """Sizes that were measured, samples behind each figure, and the time that it took."""
    started = one._clock()
    measure([one], turns=turns, deadline=started + seconds, clock=one._clock)
    costs = one.costs()
    assert costs is not None
    return sorted(costs.passes), costs.samples, one._clock() - started


def test_with_time_enough_everything_is_measured_as_often_as_asked() -> None:
    clock = Clock()
    one = timer(clock)
    sizes, samples, _ = measured(one, 1e9, turns=4)
    # The sizes between begin two turns later, and the first sample of each warms up.
    assert (sizes, samples) == (SIZES, 2)
    costs = one.costs()
    assert costs is not None
    assert costs.passes == pytest.approx({size: 1 + 0.25 * size for size in SIZES})
    assert (costs.step, costs.draft) == pytest.approx((1.25, 1.25))


def test_one_turn_measures_the_first_sizes_once() -> None:
    assert measured(timer(Clock()), 1e9, turns=1)[:2] == (sorted(FIRST_SIZES), 1)


def test_without_time_for_what_an_answer_needs_the_time_is_kept_all_the_same() -> None:
    for seconds in (0.0, 2.0, 5.0, 15.0, 20.0):
        clock = Clock()
        one = timer(clock, 0.0, 1.0)
        started = clock()
        measure([one], turns=9, deadline=started + seconds, clock=clock)
        # Nothing is known of the first pass, which takes a second.
        assert clock() - started <= max(1.0, seconds)
        costs = one.costs()
        assert costs is None or max(costs.passes, default=0) < NEEDED


def test_the_time_is_kept_and_longer_passes_are_what_is_left_out() -> None:
    # Rows cost as much as a step each, as those of large models on a processor do.
    seen: list[list[int]] = []
    for seconds in (30.0, 40.0, 60.0, 150.0, 400.0, 1000.0):
        sizes, _, took = measured(timer(Clock(), 0.0, 1.0), seconds)
        assert took <= seconds
        seen.append(sizes)
    assert seen[0] == [1, 2, 3] and seen[-1] == SIZES
    assert list(FIRST_SIZES) in seen
    assert all(set(few) <= set(more) for few, more in pairwise(seen))


def test_turns_beyond_the_time_are_not_counted() -> None:
    assert measured(timer(Clock()), 100.0, turns=10**15) == measured(timer(Clock()), 100.0, 10**3)


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
