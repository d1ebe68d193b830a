"""Costs on disk: kept, merged, and never in the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec import process as user_cache
from mlx_specdec.draft_length import cache as cost_cache
from mlx_specdec.draft_length.cache import CostKey
from mlx_specdec.draft_length.learned import Learned

from ..decoding.simulator import CURVES, Machine, Texts, constant

KEY = CostKey("cpu", "0.32.4", "mkl", "target", 10, "draft", 3, "float32", False)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path))
    return tmp_path / "costs"


def known() -> dict[int, float]:
    return {length: each.cost for length, each in cost_cache.read(KEY).items()}


def test_what_was_written_is_read_by_the_same_key_alone() -> None:
    cost_cache.write(KEY, {0: Learned(0.004, 3.0), 1: 1.25, 4: Learned(1.75, 2.5)})
    assert cost_cache.read(KEY) == {0: (0.004, 3.0), 1: (1.25, 20.0), 4: (1.75, 2.5)}
    assert cost_cache.read(replace(KEY, rows=4)) == {}
    assert cost_cache.read(replace(KEY, mlx="0.33")) == {}
    assert cost_cache.read(replace(KEY, draft_bytes=4)) == {}


@pytest.mark.parametrize(
    ("new", "merged", "other"),
    [
        # As many rounds as stand behind each.
        (Learned(3.0, 2.0), (2.25, 8.0), (1.5, 5.0)),
        (Learned(2.0, 50.0), (2.0, 20.0), (1.5, 5.0)),
        (Learned(2.9, 1.0), (14.9 / 7, 7.0), (1.5, 5.0)),
        # Too unlike for noise: no more than the new one's; and one of them must be wrong.
        (Learned(4.0, 2.0), (3.0, 4.0), (2.25, 2.0)),
        (Learned(5.0, 2.0), (3.5, 4.0), (2.625, 2.0)),
        (Learned(9.0, 2.0), (9.0, 2.0), (6.75, 2.0)),
        (Learned(0.4, 2.0), (0.4, 2.0), (0.3, 2.0)),
    ],
)
def test_measurements_of_texts_are_weighed_by_their_rounds(
    new: Learned, merged: tuple[float, float], other: tuple[float, float]
) -> None:
    """And what nobody has measured again is as wrong as what was."""
    cost_cache.write(KEY, {0: Learned(0.1, 8.0), 1: Learned(1.5, 5.0), 4: Learned(2.0, 6.0)})
    cost_cache.merge(KEY, {4: new, 8: Learned(4.0, 1.0)})
    known = cost_cache.read(KEY)
    assert known[4] == pytest.approx(merged) and known[1] == pytest.approx(other)
    assert known[0] == (0.1, 8.0) and known[8] == (4.0, 1.0)


@pytest.mark.parametrize("poison", [2.0, 3.0])
def test_costs_that_are_all_somewhat_wrong_mend_themselves_within_ten_texts(poison: float) -> None:
    """Each text measures one length again or two, and those of the others would stay wrong."""
    machine = Machine(CURVES["M3 Ultra bf16"], 0.05, constant(0.8))
    wrong = {length: poison * cost for length, cost in enumerate(machine.costs()) if length}
    texts = Texts(machine, 12, wrong)
    texts.run(range(10))
    assert texts.run(range(40)) > 0.85 * machine.best_fixed(12, 40)[1]


def test_the_seconds_of_a_step_follow_a_machine_that_drifts() -> None:
    cost_cache.write(KEY, {0: Learned(1.0, 8.0)})
    for _ in range(6):
        cost_cache.merge(KEY, {0: Learned(1.5, 4.0)})
    assert 1.4 < cost_cache.read(KEY)[0].cost < 1.5


def test_batches_of_a_new_size_begin_with_what_their_neighbors_cost() -> None:
    kept = {1: {2: Learned(1.2, 9.0)}, 4: {2: Learned(1.6, 9.0), 3: Learned(2.0, 9.0)}, 8: {}}
    guesses = {rows: cost_cache.beside(kept, rows) for rows in (2, 8)}
    assert guesses[2] == {2: (pytest.approx(1.4), 1.0), 3: (2.0, 1.0)}
    assert guesses[8] == {2: (1.6, 1.0), 3: (2.0, 1.0)}
    assert cost_cache.beside({1: {}, 2: {0: Learned(0.01, 5.0)}}, 4) == {}


def test_what_is_no_cost_is_not_kept_and_spoils_no_other() -> None:
    cost_cache.write(KEY, {1: 1.5, 2: math.nan, 4: math.inf, 8: 0.0})
    assert known() == {1: 1.5}


def test_nothing_measured_writes_nothing_and_erases_nothing(place: Path) -> None:
    cost_cache.merge(KEY, {})
    cost_cache.write(KEY, {})
    assert not place.exists()
    cost_cache.write(KEY, {1: 1.25})
    cost_cache.write(KEY, {})
    cost_cache.write(KEY, {2: math.nan})
    assert known() == {1: 1.25}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": 3, "costs": {}}',
        json.dumps({"costs": {"1": 1.0}}),
        "nan-cost",
        "no rounds",
        "number",
        "negative",
        "words",
    ],
)
def test_damaged_files_count_as_absent_and_are_replaced(place: Path, content: str) -> None:
    cost_cache.write(KEY, {1: 1.5})
    file = next(place.iterdir())
    whole = json.loads(file.read_text())
    spoiled = {
        "nan-cost": {"1": [float("nan"), 1.0]},
        "no rounds": {"1": [1.0, 0.0]},
        "number": {"1": 1.5},
        "negative": {"-1": [1.0, 1.0]},
        "words": {"a": ["b", "c"]},
    }
    if content in spoiled:
        content = json.dumps({**whole, "costs": spoiled[content]})
    file.write_text(content)
    assert cost_cache.read(KEY) == {}
    cost_cache.merge(KEY, {2: Learned(1.75, 1.0)})
    assert cost_cache.read(KEY) == {2: (1.75, 1.0)}


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "file"))
    cost_cache.write(KEY, {1: 1.5})
    assert cost_cache.read(KEY) == {}


def test_nothing_half_written_is_left_behind(place: Path) -> None:
    for _ in range(3):
        cost_cache.merge(KEY, {1: Learned(1.5, 1.0)})
    assert [file.suffix for file in place.iterdir()] == [".json"]
