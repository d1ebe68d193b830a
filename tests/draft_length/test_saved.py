"""What texts have taught, as it is saved: for whom it counts, and what damaged files do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.draft_length.acceptance import Acceptance
from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.costs import DOUBT, Costs, unknown
from mlx_specdec.draft_length.saved import Knowledge, Memory, as_knowledge, costs_of

from ..support.draft_length_simulator import CURVES, DRAFT, Machine, constant

KEY = {"device": "cpu", "mlx": "1", "target": "t5", "target_bytes": 5}


@pytest.fixture
def learned() -> Knowledge:
    lengths = AutoLength([DRAFT])
    Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.7)).time(lengths, 200, 1)
    return lengths.knowledge


def add(learned: Knowledge) -> None:
    """As one process does."""
    Memory(path()).add(learned)


def read() -> Knowledge:
    """As another process does."""
    return Memory(path()).knowledge


def path() -> Path:
    return saved.directory() / "pair.npz"


def test_what_was_learned_is_read_again_and_only_for_its_key(learned: Knowledge) -> None:
    saved.memory(KEY).add(learned)
    known = Memory(next(saved.directory().iterdir())).knowledge
    assert set(known) == set(learned) == {"budget", "costs 1 draft", "counts draft"}
    assert all((known[name] == array).all() for name, array in learned.items())
    assert AutoLength([DRAFT], known).choose(100) == AutoLength([DRAFT], learned).choose(100)
    assert saved.memory({**KEY, "mlx": "2"}).knowledge == {}


def test_sources_and_sizes_that_a_text_did_not_use_stay(learned: Knowledge) -> None:
    add(as_knowledge({"other": {1: unknown()}, "draft": {4: unknown()}}) | {"budget": np.ones(())})
    add(learned)
    assert set(costs_of(read(), "draft")) == {1, 4} and set(costs_of(read(), "other")) == {1}
    add({})
    assert read()["budget"] == learned["budget"]


def test_a_process_writes_once_a_second_and_when_it_ends(learned: Knowledge) -> None:
    first, second = Memory(path()), Memory(path())
    first.add({"budget": np.array(0.5)})
    first.add(learned)
    other = as_knowledge({"other": {1: unknown()}})
    second.add(other)
    assert set(first.knowledge) == set(learned) and set(read()) == {"budget", *other}
    first.write()
    assert set(read()) == {*learned, *other}


@pytest.mark.parametrize("budget", [np.array("much"), np.array([1, None], dtype=object)])
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(
    budget: np.ndarray, learned: Knowledge
) -> None:
    add(learned)
    assert read() != {}
    np.savez(path(), **{**read(), "budget": budget})
    assert read() == {}
    add(learned)
    assert read()["budget"] == learned["budget"]


@pytest.mark.parametrize("content", [b"", b"[]", b"PK\x03\x04", b"\x80\x04N."])
def test_so_is_what_is_no_such_file(content: bytes, learned: Knowledge) -> None:
    add(learned)
    path().write_bytes(content)
    assert read() == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_harms_nobody(learned: Knowledge) -> None:
    saved.directory().mkdir(parents=True)
    saved.directory().chmod(0o500)
    add(learned)
    assert read() == {}


def test_counts_of_another_length_count_as_far_as_they_go() -> None:
    acceptance = Acceptance(3, np.array([[9.0, 8.0], [8.0, 2.0]]))
    assert acceptance.counts.tolist() == [[9.0, 8.0, 0.0], [8.0, 2.0, 0.0]]
    tokens, lucky = acceptance.tokens(2.0)
    assert tokens[0] == 1.0 and (np.diff(tokens) > 0).all() and tokens[1] > 1.7
    assert all(more > each for more, each in zip(lucky[1:], tokens[1:], strict=True))


def test_costs_learn_the_ratio_though_the_machine_gets_slower() -> None:
    costs, dice = Costs({"draft": unknown()}), np.random.default_rng(0)
    for number in range(400):
        slow = 3.0 if number > 200 else 1.0
        seconds = slow * (1.6 if number % 4 else 1.0) * float(np.exp(0.1 * dice.normal()))
        if number % 4:
            costs.add("draft", 3, seconds, 100, 0)
        else:
            costs.add("", 0, seconds, 100)
    rounds, errors = costs.rounds("draft", 16)
    assert rounds[3] == pytest.approx(1.6, rel=0.06)
    assert costs.plain == pytest.approx(3.0, rel=0.15)
    assert errors[0] == 0 and errors[3] < 0.1 < errors[16]


def test_what_reading_costs_is_learned_apart_from_the_length() -> None:
    costs = Costs({"draft": unknown()})
    for _ in range(60):
        for _ in range(10):
            costs.add("", 0, 1.0, 100)
        costs.add("draft", 2, 1.5 + 10 * 0.05, 100, 10)
        for _ in range(4):
            costs.add("draft", 2, 1.5, 100, 0)
    assert costs.rounds("draft", 16)[0][2] == pytest.approx(1.5, rel=0.05)
    assert costs.reading("draft", 10)[0] == pytest.approx(0.5, rel=0.2)


def test_a_long_reading_before_a_first_draft_is_no_cost_of_its_length() -> None:
    costs = Costs({"draft": unknown()})
    for _ in range(3):
        costs.add("", 0, 1.0, 1)
    # As an encoder reads with a BLAS that reads the weights for each token.
    costs.add("draft", 1, 8.0, 1, 25)
    assert costs.rounds("draft", 16)[0][1] < 2.2 and costs.reading("draft", 25)[0] > 4


def test_what_is_never_drafted_is_not_doubted_more_and_more() -> None:
    costs = Costs({"seldom": unknown(), "draft": unknown()})
    for number in range(20_000):
        # Each minute the machine gets faster, so that rounds take less than they can cost.
        seconds = 0.1 ** (number // 2000)
        if number % 4:
            costs.add("draft", 1, 1.3 * seconds, 100, 0)
        else:
            costs.add("", 0, seconds, 100)
    before = np.diagonal(unknown().covariance)
    for name in ("seldom", "draft"):
        covariance = costs.block(name).covariance
        assert (np.diagonal(covariance) <= before + 2 * DOUBT).all()
        assert np.linalg.eigvalsh(covariance)[0] > -1e-9
