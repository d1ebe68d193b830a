"""A tiny translator and a tiny completer on disk, and a way to run the commands."""

from pathlib import Path

import pytest

from ..support.commands import run
from ..support.models import make_llama, make_t5, moved

__all__ = ["run"]


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def t5_draft(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The T5 itself, its weights moved a little."""
    return moved(t5, tmp_path_factory.mktemp("t5-draft"), 0.02)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where the batch command writes, with nothing beside it."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out.jsonl"
