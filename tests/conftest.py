"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def costs_are_kept_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads or writes what the user's own texts have measured."""
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path / "costs-of-rounds"))


@pytest.fixture(autouse=True)
def contexts_are_compared_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug switch is on: a rewind that kept the wrong rows fails wherever it happens."""
    monkeypatch.setenv("MLX_SPECDEC_DEBUG", "1")
