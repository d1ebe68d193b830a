"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Tests that took long where they were last measured; scripts/list_slow_tests.py writes them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A measured list, since often a few parameters of a test are what takes long."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def surroundings_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads or writes the costs that the user's own decoding measured, and what runs is
    what users run: the debugging shadow is off, in subprocesses too."""
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path / "costs-of-rounds"))
    monkeypatch.delenv("MLX_SPECDEC_DEBUG", raising=False)


@pytest.fixture
def shadowed(monkeypatch: pytest.MonkeyPatch, surroundings_are_left_out: None) -> None:
    """The debugging shadow is on: a rewind that kept the wrong rows is noticed at once."""
    monkeypatch.setenv("MLX_SPECDEC_DEBUG", "1")
