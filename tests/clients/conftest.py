"""A real server on loopback for clients of others, of the extra `clients`; all of it is slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from ..serve.conftest import moved, running
from ..serve.test_sockets import listening
from ..serve.tooled import make_tooled

HERE = Path(__file__).parent
MODEL = "tiny"
KEY = "no key is asked for"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for each in items:
        if HERE in each.path.parents:
            each.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a tiny model with a draft is served that knows tools and thoughts."""
    directory = make_tooled(tmp_path_factory.mktemp("tooled"))
    draft = moved(directory, tmp_path_factory.mktemp("tooled-draft"))
    with running((directory, draft)) as engine, listening(engine) as place:
        yield f"http://127.0.0.1:{place.port}"


@pytest.fixture(scope="session")
def base_url(root: str) -> str:
    """As OpenAI's clients want it."""
    return f"{root}/v1"


@pytest.fixture(scope="session")
def shipped() -> Iterator[str]:
    """Where the shipped Python model is served, which has no chat template."""
    with (
        running(("weights/py-llama", "weights/py-llama-draft")) as engine,
        listening(engine) as place,
    ):
        yield f"http://127.0.0.1:{place.port}"
