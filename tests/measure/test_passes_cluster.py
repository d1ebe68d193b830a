"""The closed form of rounds on several machines, against numbers worked out by hand and a loop."""

from __future__ import annotations

import pytest

from mlx_specdec.measure.prediction import RoundCost, break_even, pays_below, shared, speedups

from ..support.estimates import EXPECTED, THRESHOLDS, costs, share


@pytest.mark.parametrize(("name", "machines", "us", "plain", "speculative", "gain"), EXPECTED)
def test_rates_are_those_worked_out_by_hand(
    name: str, machines: int, us: float, plain: float, speculative: float, gain: float
) -> None:
    step, exchanges, cost, acceptance = costs(name)
    network = us / 1000 * exchanges / step
    part = share(name, machines)
    rate = 1000 / step / (part + network)
    assert rate == pytest.approx(plain, abs=0.051)
    speedup = speedups(shared(cost, part, network), acceptance)[-1]
    assert speedup == pytest.approx(gain, abs=0.0051)
    assert speedup * rate == pytest.approx(speculative, abs=0.051)


@pytest.mark.parametrize(("name", "machines", "even", "plain", "speculative"), THRESHOLDS)
def test_thresholds_are_those_worked_out_by_hand(
    name: str, machines: int, even: float, plain: float, speculative: float
) -> None:
    step, exchanges, cost, acceptance = costs(name)
    part, us = share(name, machines), 1000 * step / exchanges
    network = break_even(cost, part, acceptance)
    assert network is not None and network * us == pytest.approx(even, abs=0.51)
    assert pays_below(cost, part, ()) * us == pytest.approx(plain, abs=0.51)
    assert pays_below(cost, part, acceptance) * us == pytest.approx(speculative, abs=0.51)


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_at_the_thresholds_both_sides_are_equal(start: float, replays: bool) -> None:
    cost = RoundCost(0.08, {1: 1.0, 2: 1.05, 5: 1.4}, start, replays)
    acceptance, part = [0.8, 0.64, 0.5, 0.4], 0.55
    alone = speedups(cost, acceptance)[-1]
    network = break_even(cost, part, acceptance)
    assert network is not None and network > 0
    assert speedups(shared(cost, part, network), acceptance)[-1] == pytest.approx(alone)
    assert speedups(shared(cost, part, 2 * network), acceptance)[-1] > alone
    below = pays_below(cost, part, acceptance)
    there = (part + below) * shared(cost, part, below).of(acceptance)
    assert there == pytest.approx(cost.of(acceptance))
