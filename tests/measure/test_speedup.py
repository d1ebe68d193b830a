"""S(gamma), by hand and against the published formula."""

from dataclasses import replace

import pytest

from mlx_specdec.measure.prediction import (
    RoundCost,
    expected_rounds,
    speedups,
)

FREE = RoundCost(draft=0.0, passes={1: 1.0})


def alike(alpha: float, count: int) -> list[float]:
    """Acceptance by position where every token has the same probability."""
    return [alpha**place for place in range(1, count + 1)]


def test_a_round_of_no_drafts_is_plain_decoding() -> None:
    assert RoundCost(0.2, {1: 1.3, 3: 1.5}, start=0.3).of([]) == 1.0
    assert speedups(RoundCost(0.2, {1: 1.3, 3: 1.5}), []) == (1.0,)


def test_the_speedup_is_tokens_over_cost() -> None:
    # (1 + 0.5 + 0.25) / (2 * 0.25 + 1.25), by hand.
    cost = RoundCost(draft=0.25, passes={1: 1.0, 2: 1.1, 3: 1.25})
    assert speedups(cost, alike(0.5, 2))[2] == pytest.approx(1.0)
    # What every round waits for at its start is part of its cost.
    assert speedups(replace(cost, start=0.25), alike(0.5, 2))[2] == pytest.approx(1.75 / 2)
    # (1 + .8 + .6) / (2 * .1 + V(3) + .05): acceptance need not be the same everywhere.
    cost = RoundCost(0.1, {1: 1.0, 5: 1.8}, start=0.05)
    assert speedups(cost, [0.8, 0.6]) == pytest.approx([1, 1.8 / 1.35, 2.4 / 1.65])
    # With free passes and drafts it is the geometric sum of Leviathan et al., equation 1.
    assert speedups(FREE, alike(0.8, 5))[5] == pytest.approx((1 - 0.8**6) / (1 - 0.8))


def test_a_sequence_that_ends_cuts_its_last_round_short() -> None:
    # Both drafted tokens are always kept: one round for up to three tokens, and two for four.
    assert expected_rounds([1.0, 1.0], 4) == pytest.approx([0, 1, 1, 1, 2])
    # Half of the rounds emit two tokens: R(2) = 1 + R(1) / 2, R(3) = 1 + R(2) / 2 + R(1) / 2.
    assert expected_rounds([0.5], 3) == pytest.approx([0, 1, 1.5, 2.25])
    gains = speedups(replace(FREE, draft=0.1), [0.5], [2, 3])
    assert gains == pytest.approx([1, 5 / 3.75 / 1.1])


def test_a_long_sequence_is_decoded_as_fast_as_one_without_end() -> None:
    cost = RoundCost(0.1, {1: 1.2})
    endless, ending = speedups(cost, [0.8, 0.6]), speedups(cost, [0.8, 0.6], [5000])
    assert ending == pytest.approx(endless, rel=1e-3)


def test_costs_between_measured_sizes_lie_on_straight_lines() -> None:
    cost = RoundCost(0.0, {1: 1.0, 2: 2.0, 6: 4.0})
    assert [cost.pass_over(tokens) for tokens in range(1, 7)] == [1, 2, 2.5, 3, 3.5, 4]
    assert RoundCost(0.0, {1: 7.0}).pass_over(5) == 7.0
