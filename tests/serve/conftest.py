"""A tiny Llama with its draft and a tiny T5, each behind an engine in its own thread."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve.engine import Engine

from ..support.models import make_llama, make_t5, moved
from ..support.serving import TEMPLATE, client_of, running


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = make_llama(tmp_path_factory.mktemp("served-llama"))
    return directory, moved(directory, tmp_path_factory.mktemp("served-llama-draft"))


@pytest.fixture(scope="session")
def templated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, None]:
    return make_llama(tmp_path_factory.mktemp("templated"), chat_template=TEMPLATE), None


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = make_t5(tmp_path_factory.mktemp("served-t5"))
    return directory, moved(directory, tmp_path_factory.mktemp("served-t5-draft"))


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Path]) -> Iterator[Engine]:
    with running(llama) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Any:
    return client_of(engine)


@pytest.fixture(scope="module")
def pair(llama: tuple[Path, Path]) -> Pair:
    """The same models once more, for the tests' own thread."""
    return load(*llama)


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Callable[..., str]:
    """What a prompt becomes by itself, plainly decoded."""

    def text(prompt: list[int], **settings: object) -> str:
        options = {"max_tokens": 24, "cost_cache": False, **settings}
        return generate(pair, prompt, Options(regular=True, **options)).text

    return text
