"""The controller alone and in the simulator: never far below plain, near the best fixed length."""

from __future__ import annotations

import time

import pytest

from mlx_specdec.decoding.draft_length import AutoLength, FixedLength
from mlx_specdec.errors import OptionError

from .simulator import CURVES, Machine, verify_cost

DRAFTS = (0.02, 0.1, 0.3)
ACCEPTANCES = (0.1, 0.5, 0.8, 0.95)


def test_a_fixed_length_is_cut_where_the_text_ends() -> None:
    lengths = FixedLength(5)
    assert [lengths.choose(room) for room in (1, 2, 6, 100)] == [0, 1, 5, 5]
    with pytest.raises(OptionError, match="num-draft"):
        FixedLength(-1)


def test_published_points_are_met_and_joined() -> None:
    curve = CURVES["M3 Ultra 4-bit"]
    assert verify_cost(curve, 8) == 6.12
    assert verify_cost(curve, 3) == pytest.approx((1.83 + 3.26) / 2)
    assert verify_cost(CURVES["linear"], 17) == pytest.approx(17)


@pytest.mark.parametrize("room", range(1, 8))
def test_the_room_is_never_overrun(room: int) -> None:
    lengths = AutoLength()
    for _ in range(60):
        count = lengths.choose(room)
        assert 0 <= count <= room - 1
        lengths.observe(count, count, 1.0 + 0.01 * count)


def test_a_hopeless_draft_is_parked_and_still_probed() -> None:
    lengths, chosen = AutoLength(), []
    for _ in range(3000):
        count = lengths.choose(10_000)
        chosen.append(count)
        lengths.observe(count, 0, 1.0 if count == 0 else 2.0 + 0.1 * count)
    assert chosen.count(0) > 0.98 * len(chosen)
    assert any(chosen[1500:])


def test_a_draft_that_turns_good_is_taken_up_again() -> None:
    lengths = AutoLength()
    for index in range(4000):
        count = lengths.choose(10_000)
        if index == 300:
            assert count == 0
        lengths.observe(count, count if index > 400 else 0, 1.0 + 0.15 * count)
    assert lengths.choose(10_000) >= 4


def test_a_flat_curve_ends_far_from_a_steep_one() -> None:
    chosen = {}
    for price in (0.02, 0.9):
        lengths = AutoLength()
        for _ in range(200):
            count = lengths.choose(10_000)
            lengths.observe(count, count, 1.0 + price * count)
        chosen[price] = lengths.choose(10_000)
    assert chosen[0.02] == AutoLength.MOST
    steep = AutoLength()
    for _ in range(200):
        count = steep.choose(10_000)
        steep.observe(count, 0, 1.0 + 0.9 * count)
    assert steep.choose(10_000) == 0


def test_one_stalled_round_changes_nothing() -> None:
    lengths = AutoLength()
    for index in range(300):
        count = lengths.choose(10_000)
        seconds = 1.0 + 0.1 * count
        lengths.observe(count, count, 50 * seconds if index == 150 else seconds)
        if index >= 100:
            assert count == AutoLength.MOST


@pytest.mark.parametrize("name", CURVES)
def test_a_whole_cold_run_of_100_tokens_is_never_far_below_plain(name: str) -> None:
    for draft in DRAFTS:
        for alpha in ACCEPTANCES:
            machine = Machine(CURVES[name], draft, lambda _, a=alpha: a)
            plain = machine.mean(lambda: FixedLength(0), 100, 20)
            auto = machine.mean(AutoLength, 100, 20)
            assert auto >= 0.87 * plain, (draft, alpha)


@pytest.mark.parametrize("name", CURVES)
def test_longer_runs_come_near_the_best_fixed_length(name: str) -> None:
    for draft in DRAFTS:
        for alpha in ACCEPTANCES:
            machine = Machine(CURVES[name], draft, lambda _, a=alpha: a)
            best = machine.best_fixed()[0]
            by_hand = machine.mean(lambda count=best: FixedLength(count), 1000, 8)
            assert machine.mean(AutoLength, 1000, 8) >= 0.85 * by_hand, (draft, alpha)


def test_choosing_and_learning_take_microseconds() -> None:
    lengths, seconds = AutoLength(), []
    for _ in range(2000):
        started = time.perf_counter()
        count = lengths.choose(10_000)
        lengths.observe(count, count // 2, 1.0 + 0.1 * count)
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[len(seconds) // 2] < 200e-6
