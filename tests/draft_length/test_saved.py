"""What texts have taught, as it is saved: for whom it counts, and what damaged files do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.draft_length.acceptance import Acceptance
from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.costs import DOUBT, Costs, unknown
from mlx_specdec.draft_length.saved import Knowledge

from ..support.draft_length_simulator import CURVES, DRAFT, Machine, constant

KEY = {"device": "cpu", "mlx": "1", "target": "t5", "target_bytes": 5}


@pytest.fixture
def learned() -> Knowledge:
    lengths = AutoLength([DRAFT])
    Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.7)).time(lengths, 200, 1)
    return lengths.knowledge


@pytest.fixture(autouse=True)
def processes_that_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees what is in the file, and writes it at once."""
    monkeypatch.setattr(saved, "_files", Forgetful())


class Forgetful(dict[Path, Any]):
    """Never has what it was given before the last `add`."""

    def __contains__(self, path: object) -> bool:
        return False


def file() -> Path:
    [only] = saved.directory().iterdir()
    return only


def test_what_was_learned_is_read_again_and_only_for_its_key(learned: Knowledge) -> None:
    saved.add(KEY, learned)
    known = saved.read(KEY)
    assert known.budget == learned.budget
    block, again = learned.costs["draft"][1], known.costs["draft"][1]
    assert again.mean == pytest.approx(block.mean, rel=1e-5)
    assert again.covariance == pytest.approx(block.covariance, rel=1e-5, abs=1e-9)
    assert known.counts["draft"] == pytest.approx(learned.counts["draft"], abs=1e-3)
    assert AutoLength([DRAFT], known).choose(100) == AutoLength([DRAFT], learned).choose(100)
    assert saved.read({**KEY, "mlx": "2"}) == Knowledge()


def test_sources_and_sizes_that_a_text_did_not_use_stay(learned: Knowledge) -> None:
    saved.add(KEY, Knowledge({"other": {1: unknown()}, "draft": {4: unknown()}}, budget=1.0))
    saved.add(KEY, learned)
    known = saved.read(KEY)
    assert set(known.costs) == {"draft", "other"} and set(known.costs["draft"]) == {1, 4}
    saved.add(KEY, Knowledge())
    assert saved.read(KEY).budget == learned.budget


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("costs"),
        lambda content: content.update(budget="much"),
        lambda content: content.update(budget=float("inf")),
        lambda content: content["counts"].update(draft=[[1.0], [2.0]]),
        lambda content: content["counts"].update(draft=[[1.0, 2.0], [float("nan"), 0.0]]),
        lambda content: content["counts"].update(draft=7),
        lambda content: content["costs"]["draft"]["1"][0].pop(),
        lambda content: content["costs"]["draft"]["1"][1].pop(),
        lambda content: content["costs"]["draft"]["1"][0].__setitem__(3, 1e9),
        lambda content: content["costs"]["draft"]["1"][1].__setitem__(0, -1.0),
        lambda content: content["costs"].update(draft={"one": [[], []]}),
        lambda content: content["costs"]["draft"].update({"0": content["costs"]["draft"]["1"]}),
        lambda content: content.update(key={}),
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(damage, learned: Knowledge) -> None:
    saved.add(KEY, learned)
    content = json.loads(file().read_text())
    damage(content)
    file().write_text(json.dumps(content))
    assert saved.read(KEY) == Knowledge()
    saved.add(KEY, learned)
    assert saved.read(KEY).budget == learned.budget


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\x00", b'{"key": 1'])
def test_so_is_what_is_no_such_file(content: bytes, learned: Knowledge) -> None:
    saved.add(KEY, learned)
    file().write_bytes(content)
    assert saved.read(KEY) == Knowledge()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_harms_nobody(learned: Knowledge) -> None:
    saved.directory().mkdir(parents=True)
    saved.directory().chmod(0o500)
    saved.add(KEY, learned)
    assert saved.read(KEY) == Knowledge()


def test_counts_of_another_length_count_as_far_as_they_go() -> None:
    acceptance = Acceptance(3, np.array([[9.0, 8.0], [8.0, 2.0]]))
    assert acceptance.counts.tolist() == [[9.0, 8.0, 0.0], [8.0, 2.0, 0.0]]
    tokens, lucky = acceptance.tokens(2.0)
    assert tokens[0] == 1.0 and (np.diff(tokens) > 0).all() and tokens[1] > 1.7
    assert (lucky[1:] > tokens[1:]).all()


def test_costs_learn_the_ratio_though_the_machine_gets_slower() -> None:
    costs, dice = Costs({"draft": unknown()}), np.random.default_rng(0)
    for number in range(400):
        slow = 3.0 if number > 200 else 1.0
        seconds = slow * (1.6 if number % 4 else 1.0) * float(np.exp(0.1 * dice.normal()))
        if number % 4:
            costs.add("draft", 3, seconds, 100, 0)
        else:
            costs.add_plain(seconds, 100)
    logarithms, errors = costs.logarithms("draft", 16)
    assert np.exp(logarithms[3]) == pytest.approx(1.6, rel=0.06)
    assert costs.plain == pytest.approx(3.0, rel=0.15)
    assert errors[0] == 0 and errors[3] < 0.1 < errors[16]


def test_what_reading_costs_is_learned_apart_from_the_length() -> None:
    costs = Costs({"draft": unknown()})
    for _ in range(60):
        for _ in range(10):
            costs.add_plain(1.0, 100)
        costs.add("draft", 2, 1.5 + 10 * 0.05, 100, 10)
        for _ in range(4):
            costs.add("draft", 2, 1.5, 100, 0)
    logarithms, _ = costs.logarithms("draft", 16)
    assert np.exp(logarithms[2]) == pytest.approx(1.5, rel=0.05)
    assert costs.reading("draft", 10) == pytest.approx(0.5, rel=0.2)


def test_a_long_reading_before_a_first_draft_is_no_cost_of_its_length() -> None:
    costs = Costs({"draft": unknown()})
    for _ in range(3):
        costs.add_plain(1.0, 1)
    # As an encoder reads with a BLAS that reads the weights for each token.
    costs.add("draft", 1, 8.0, 1, 25)
    logarithms, _ = costs.logarithms("draft", 16)
    assert np.exp(logarithms[1]) < 2.2 and costs.reading("draft", 25) > 4


def test_what_is_never_drafted_is_not_doubted_more_and_more() -> None:
    costs = Costs({"seldom": unknown(), "draft": unknown()})
    for number in range(20_000):
        # Each minute the machine gets faster, so that rounds take less than they can cost.
        seconds = 0.1 ** (number // 2000)
        if number % 4:
            costs.add("draft", 1, 1.3 * seconds, 100, 0)
        else:
            costs.add_plain(seconds, 100)
    before = np.diagonal(unknown().covariance)
    for name in ("seldom", "draft"):
        covariance = costs.block(name).covariance
        assert (np.diagonal(covariance) <= before + 2 * DOUBT).all()
        assert np.linalg.eigvalsh(covariance)[0] > -1e-9


def test_a_process_writes_once_a_second_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, learned: Knowledge
) -> None:
    monkeypatch.setattr(saved, "_files", {})
    saved.add(KEY, Knowledge(budget=0.5))
    saved.add(KEY, learned)
    assert set(saved.read(KEY).costs) == {"draft"}
    assert json.loads(file().read_text())["costs"] == {}
    saved._write_all()
    assert set(json.loads(file().read_text())["costs"]) == {"draft"}
