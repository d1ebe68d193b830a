"""A tiny Llama with its draft and a tiny T5, each behind an engine in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_specdec.engine.generate import Pair, generate, load
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.options import Options
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.limits import Limits

from ..cli.conftest import make_llama, make_t5

OPTIONS = Options(proposer="auto", num_draft=2, max_tokens=24, cost_cache=False)
LIMITS = Limits()
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if calm %} {{ calm }}{% endif %}{% endif %}"
)


def moved(source: Path, target: Path) -> Path:
    """The same model, its weights moved a little: a draft that is often right."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = dict(mx.load(str(source / "model.safetensors")))
    near = tree_map(lambda array: array * (1 + 0.05 * mx.sin(100 * array)), weights)
    mx.save_safetensors(str(target / "model.safetensors"), near)
    return target


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


@contextmanager
def running(
    directories: tuple[Path, Path | None],
    options: Options = OPTIONS,
    *,
    batch_size: int = 4,
    waiting: int = LIMITS.waiting,
    store: Store | None = None,
    memory_budget: int | None = None,
) -> Iterator[Engine]:
    """An engine that has loaded."""
    engine = Engine(
        lambda: (load(*directories), options),
        batch_size=batch_size,
        waiting=waiting,
        store=store,
        memory_budget=memory_budget,
    )
    loaded = threading.Event()
    engine.start(then=loaded.set)
    assert loaded.wait(60) and engine.problem is None
    try:
        yield engine
    finally:
        engine.close()
        assert engine.join(60)


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Path]) -> Iterator[Engine]:
    with running(llama) as engine:
        yield engine


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
