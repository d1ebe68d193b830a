"""Real servers for clients of others, of the extra `clients`; all of it is slow."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ..contract.support import ROOT, moved, served
from ..support.tooled import CALLS, make_tooled
from ..support.tools import MODEL

HERE = Path(__file__).parent
FILLING = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def pytest_configure(config: pytest.Config) -> None:
    """Tests of LangChain's are coroutines, which pytest-asyncio runs where it comes along."""
    if hasattr(config.option, "asyncio_mode"):
        config.option.asyncio_mode = "auto"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.slow)
        # Warnings of other libraries cannot be mended here.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if inspect.iscoroutinefunction(getattr(item, "function", None)):
            # langchain-openai keeps one client for all tests, which lives in one loop.
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def address_of(model: Path, *flags: object) -> Iterator[str]:
    """Serve a model, and yield the address of the server. Skips without the extra grammar."""
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    settings = ("--num-draft", 2, "--max-tokens", 24, "--no-cost-cache")
    with served("--model", model, *settings, *flags) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows tools."""
    return make_tooled(tmp_path_factory.mktemp("tooled") / MODEL, marks=CALLS)


@pytest.fixture(scope="session")
def root(tooled: Path) -> Iterator[str]:
    """The address of a tiny model with a draft that knows tools."""
    draft = moved(tooled, tooled.with_name("draft"))
    yield from address_of(tooled, "--draft-model", draft)


@pytest.fixture(scope="session")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that fills in texts as well."""
    directory = tmp_path_factory.mktemp("filling") / MODEL
    yield from address_of(make_tooled(directory, marks=(*CALLS, *FILLING)))


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that knows thoughts as well, which have no end in random texts."""
    yield from address_of(make_tooled(tmp_path_factory.mktemp("thinking") / MODEL))


@pytest.fixture(scope="session")
def ending(tooled: Path) -> dict[str, int]:
    """logit_bias with which a random model ends the strings that it has begun."""
    tokenizer = Tokenizer.from_file(str(tooled / "tokenizer.json"))
    return {str(tokenizer.token_to_id('"')): 20}


@pytest.fixture(scope="session")
def base_url(root: str) -> str:
    """As OpenAI's clients want it."""
    return f"{root}/v1"


@pytest.fixture(scope="session")
def shipped() -> Iterator[str]:
    """The address of the shipped Python model, which has no chat template."""
    draft = ROOT / "weights/py-llama-draft"
    yield from address_of(ROOT / "weights/py-llama", "--draft-model", draft)


@pytest.fixture(scope="session")
def translator() -> Iterator[str]:
    """The address of the pair that `serve` takes without a model."""
    draft = ROOT / "weights/t5-enfr-draft"
    yield from address_of(ROOT / "weights/t5-enfr", "--draft-model", draft)
