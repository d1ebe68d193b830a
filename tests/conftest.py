"""What holds for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def contexts_are_compared_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug switch is on: a rewind that kept the wrong rows fails wherever it happens."""
    monkeypatch.setenv("MLX_SPECDEC_DEBUG", "1")
