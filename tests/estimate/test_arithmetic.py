from __future__ import annotations

import pytest

from mlx_specdec.estimate.arithmetic import (
    ALPHAS,
    Costs,
    best,
    between,
    emitted,
    extrapolate,
    round_cost,
    speed_up,
)


def test_a_round_of_no_drafts_is_plain_decoding() -> None:
    costs = Costs(draft=0.2, passes=(1.3, 1.4, 1.5))
    assert all(speed_up(costs, alpha, 0) == 1 for alpha in ALPHAS)


def test_the_speed_up_is_tokens_over_cost() -> None:
    # (1 + 0.5 + 0.25) / (2 * 0.25 + 1.25), by hand.
    costs = Costs(draft=0.25, passes=(1.0, 1.1, 1.25))
    assert emitted(0.5, 2) == 1.75
    assert speed_up(costs, 0.5, 2) == pytest.approx(1.0)
    # What every round waits for at its start is part of its cost.
    assert speed_up(Costs(0.25, (1.0, 1.1, 1.25), start=0.25), 0.5, 2) == pytest.approx(1.75 / 2)
    # With free passes and drafts it is the geometric sum of Leviathan et al., equation 1.
    free = Costs(draft=0.0, passes=(1.0,) * 6)
    assert speed_up(free, 0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))


def test_the_best_length_is_the_best_of_all_and_none_where_nothing_gains() -> None:
    costs = Costs(draft=0.1, passes=tuple(1 + 0.05 * m for m in range(17)))
    for alpha in ALPHAS:
        chosen = best(costs, alpha)
        every = [speed_up(costs, alpha, gamma) for gamma in range(17)]
        assert chosen.speed_up == max(every) == every[chosen.num_draft]
    lengths = [best(costs, alpha).num_draft for alpha in ALPHAS]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    dear = Costs(draft=0.9, passes=tuple(float(m) for m in range(1, 18)))
    assert best(dear, 0.95).num_draft == 0
    assert best(dear, 0.95).speed_up == 1


def test_models_that_replay_pay_for_what_is_rejected_and_for_nothing_else() -> None:
    passes = (1.0, 2.0, 4.0)
    free, paying = Costs(0.0, passes), Costs(0.0, passes, replays=True)
    assert round_cost(paying, 1.0, 2) == round_cost(free, 1.0, 2) == 4.0
    assert round_cost(paying, 0.0, 2) == pytest.approx(4.0 + 1.0)
    # alpha 0.5, gamma 2: rejected at the first in 2 of 3 cases; 1/3 token stays, rounded to none.
    assert round_cost(paying, 0.5, 2) == pytest.approx(4.0 + 0.75 * 1.0)


def test_layers_lie_on_a_line_whose_start_is_what_all_depths_share() -> None:
    head, layer = 0.5, 0.25
    seconds = {depth: head + layer * depth for depth in (2, 6, 32)}
    assert extrapolate(seconds[2], seconds[6], (2, 6), 32) == pytest.approx(seconds[32])
    assert extrapolate(seconds[2], seconds[6], (2, 6), 6) == pytest.approx(seconds[6])


def test_noise_never_makes_more_layers_cheaper() -> None:
    assert extrapolate(1.2, 1.0, (2, 6), 32) == 1.2


def test_what_was_not_measured_lies_between_its_neighbours() -> None:
    assert between({1: 1.0, 3: 2.0, 7: 4.0}, 6) == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
