"""What is timed are sums over the group, and the figures are of one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import measure_all_sum as script

from .support.thread_ranks import Rank, adding_up, on_every, ranks


def test_machines_add_up_as_often_as_is_said_and_keep_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ranks(3)
    with adding_up(monkeypatch):
        kept = on_every(group, lambda rank: script.sums(mx.ones((2, 4)), 5, rank).tolist())
    assert [rank.sums for rank in group] == [5, 5, 5]
    assert all(mx.allclose(mx.array(states), mx.ones((2, 4))) for states in kept)


def test_what_is_added_up_in_another_order_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {}
    with adding_up(monkeypatch):
        for rows in (1, 4):
            told = on_every(
                ranks(3), lambda rank, m=rows: script.same_as_alone(rank, 64, m, mx.float32)
            )
            assert len(set(told)) == 1
            shares[rows] = told[0]
        # Threads add up in one order, whatever the rows; here the first comes last where there are
        # several.
        plain = Rank.add_up

        def other_order(rank: Rank, part: mx.array) -> mx.array:
            sums = plain(rank, part)
            first, *others = (each._part for each in rank._ranks)
            return sums if part.shape[0] == 1 else sum(others[1:], others[0]) + first

        monkeypatch.setattr(Rank, "add_up", other_order)
        turned = on_every(ranks(3), lambda rank: script.same_as_alone(rank, 64, 4, mx.float32))
    assert shares == {1: 1.0, 4: 1.0}
    assert 0.3 < turned[0] < 1


def test_figures_are_of_one_sum() -> None:
    taken = [float(place) for place in range(100, 0, -1)]
    assert script.figures(taken) == {"median_us": 50.5, "p90_us": 91.0}
    assert script.figures([640.0], 64) == {"median_us": 10.0, "p90_us": 10.0}


def test_one_machine_has_figures_for_all_rows() -> None:
    group = mx.distributed.init()
    told = script.measure(group, 8, 3, mx.bfloat16, count=4, turns=2)
    assert (told["rows"], told["bytes"]) == (3, 48)
    assert all(told[kind]["median_us"] > 0 for kind in ("alone", "in_a_pass"))
