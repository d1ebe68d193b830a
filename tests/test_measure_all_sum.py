"""What is timed are sums over the group, and the figures are of one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import measure_all_sum as script

from .thread_ranks import adding_up, on_every, ranks


def test_machines_add_up_as_often_as_is_said_and_keep_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ranks(3)
    with adding_up(monkeypatch):
        kept = on_every(group, lambda rank: script.sums(mx.ones((2, 4)), 5, rank).tolist())
    assert [rank.sums for rank in group] == [5, 5, 5]
    assert all(mx.allclose(mx.array(states), mx.ones((2, 4))) for states in kept)


def test_figures_are_of_one_sum() -> None:
    taken = [float(place) for place in range(100, 0, -1)]
    assert script.figures(taken) == {"median_us": 50.5, "p90_us": 91.0}
    assert script.figures([640.0], 64) == {"median_us": 10.0, "p90_us": 10.0}


def test_one_machine_has_figures_for_all_rows() -> None:
    group = mx.distributed.init()
    told = script.measure(group, 8, 3, mx.bfloat16, count=4, turns=2)
    assert (told["rows"], told["bytes"]) == (3, 48)
    assert all(told[kind]["median_us"] > 0 for kind in ("alone", "in_a_pass"))
