"""What several files of the contract share: tiny models, and one server of many of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .several import Several, serve_several
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


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """One server of several small models, for tests that change nothing in it."""
    with serve_several(tmp_path_factory.mktemp("several")) as running:
        yield running
