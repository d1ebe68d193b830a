"""Costs on disk: kept, merged, and never in the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec import user_cache
from mlx_specdec.costs import cache as cost_cache
from mlx_specdec.costs.cache import CostKey

KEY = CostKey("cpu", "0.32.4", "mkl", "target", 10, "draft", 3, "float32", False)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path))
    return tmp_path / "costs"


def test_what_was_written_is_read_by_the_same_key_alone() -> None:
    cost_cache.write(KEY, {1: 1.25, 4: 1.75})
    assert cost_cache.read(KEY) == {1: 1.25, 4: 1.75}
    assert cost_cache.read(replace(KEY, mlx="0.33")) == {}
    assert cost_cache.read(replace(KEY, draft_bytes=4)) == {}


def test_new_measurements_move_the_old_ones_halfway_and_keep_the_others() -> None:
    cost_cache.write(KEY, {1: 1.0, 4: 2.0})
    cost_cache.merge(KEY, {4: 3.0, 8: 4.0})
    assert cost_cache.read(KEY) == {1: 1.0, 4: 2.5, 8: 4.0}


def test_what_is_no_cost_is_not_kept_and_spoils_no_other() -> None:
    cost_cache.write(KEY, {1: 1.5, 2: math.nan, 4: math.inf, 8: 0.0})
    assert cost_cache.read(KEY) == {1: 1.5}


def test_nothing_measured_writes_nothing_and_erases_nothing(place: Path) -> None:
    cost_cache.merge(KEY, {})
    cost_cache.write(KEY, {})
    assert not place.exists()
    cost_cache.write(KEY, {1: 1.25})
    cost_cache.write(KEY, {})
    cost_cache.write(KEY, {2: math.nan})
    assert cost_cache.read(KEY) == {1: 1.25}


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
        "zero-length",
        "words",
    ],
)
def test_damaged_files_count_as_absent_and_are_replaced(place: Path, content: str) -> None:
    cost_cache.write(KEY, {1: 1.5})
    file = next(place.iterdir())
    whole = json.loads(file.read_text())
    spoiled = {"nan-cost": {"1": float("nan")}, "zero-length": {"0": 1.0}, "words": {"a": "b"}}
    if content in spoiled:
        content = json.dumps({**whole, "costs": spoiled[content]})
    file.write_text(content)
    assert cost_cache.read(KEY) == {}
    cost_cache.merge(KEY, {2: 1.75})
    assert cost_cache.read(KEY) == {2: 1.75}


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "file"))
    cost_cache.write(KEY, {1: 1.5})
    assert cost_cache.read(KEY) == {}


def test_nothing_half_written_is_left_behind(place: Path) -> None:
    for _ in range(3):
        cost_cache.merge(KEY, {1: 1.5})
    assert [file.suffix for file in place.iterdir()] == [".json"]
