"""A real server on loopback for clients of others, of the extra `clients`; all of it is slow."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_specdec.serve.engine import Engine
from mlx_specdec.text.infill import MARKS
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.models import moved
from ..support.serving import running
from ..support.tooled import CALLS, make_tooled

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Tests of LangChain's are coroutines, which pytest-asyncio runs where it comes along."""
    if hasattr(config.option, "asyncio_mode"):
        config.option.asyncio_mode = "auto"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for each in items:
        if HERE not in each.path.parents:
            continue
        each.add_marker(pytest.mark.slow)
        # What libraries of others warn of is none of ours to mend.
        each.add_marker(pytest.mark.filterwarnings("ignore"))
        if inspect.iscoroutinefunction(getattr(each, "function", None)):
            # langchain-openai keeps one client for all tests, which lives in one loop.
            each.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def address_of(engine: Engine) -> Iterator[str]:
    """Where an engine is served. Skips without the extras server and grammar."""
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    from ..support.serving import listening

    with listening(engine) as place:
        yield f"http://127.0.0.1:{place.port}"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a tiny model with a draft is served that knows tools."""
    directory = make_tooled(tmp_path_factory.mktemp("tooled"), marks=CALLS)
    draft = moved(directory, tmp_path_factory.mktemp("tooled-draft"))
    with running((directory, draft)) as engine:
        yield from address_of(engine)


@pytest.fixture(scope="session")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where one is served that fills in texts as well."""
    directory = make_tooled(tmp_path_factory.mktemp("filling"), marks=(*CALLS, *MARKS[0]))
    with running((directory, None)) as engine:
        yield from address_of(engine)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where one is served that knows thoughts as well, which have no end in random texts."""
    directory = make_tooled(tmp_path_factory.mktemp("thinking"))
    with running((directory, None)) as engine:
        yield from address_of(engine)


@pytest.fixture(scope="session")
def ending(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """logit_bias with which a random model ends the strings that it has begun."""
    directory = make_tooled(tmp_path_factory.mktemp("pieces"), marks=CALLS)
    return {str(load_tokenizer(directory, kind="decoder-only").pieces().index('"')): 20}


@pytest.fixture(scope="session")
def base_url(root: str) -> str:
    """As OpenAI's clients want it."""
    return f"{root}/v1"


@pytest.fixture(scope="session")
def shipped() -> Iterator[str]:
    """Where the shipped Python model is served, which has no chat template."""
    with running((Path("weights/py-llama"), Path("weights/py-llama-draft"))) as engine:
        yield from address_of(engine)


@pytest.fixture(scope="session")
def translator() -> Iterator[str]:
    """Where the pair is served that `serve` takes without a model."""
    with running((Path("weights/t5-enfr"), Path("weights/t5-enfr-draft"))) as engine:
        yield from address_of(engine)
