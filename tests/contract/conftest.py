"""Tiny models that several files of the contract share: a translator, its draft, a completer."""

from pathlib import Path

import pytest

from .support import checkpoint, moved
from .translators import translator


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def t5_draft(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(t5, tmp_path_factory.mktemp("t5-draft"), 0.005)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))
