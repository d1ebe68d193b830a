"""Tiny models, and servers of many tiny models, that several files of the contract share."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pairs import PAIRS, Pairs
from .several import Several, serve_several
from .support import checkpoint, moved, served
from .translators import translator
from .zoo import Model, preset, write_models


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
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Each pair is loaded once, with all trials of its models, since no test changes it."""
    return functools.cache(lambda name: PAIRS[name](tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """One server of several small models, for tests that change nothing in it."""
    with serve_several(tmp_path_factory.mktemp("several")) as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    """Return one of many tiny models, all of them behind one server, by its name in zoo.py."""
    root = tmp_path_factory.mktemp("zoo")
    flags = write_models(root)
    file = preset(root / "models.toml", flags)
    with served("--models-preset", file, "--no-cost-cache") as server:
        yield lambda name: Model(server, name, flags[name]["model"])
