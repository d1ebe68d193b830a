"""Published models, which scripts/real_models.sh has downloaded, and what others make of them."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_path

from mlx_specdec import load

FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m.Q4_K_M.gguf",
    "qwen-coder": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
}
"""The names that scripts/real_models.sh takes, and the files that it writes."""
DIRECTORY = Path(os.environ.get("MLX_SPECDEC_CACHE") or user_cache_path("mlx-specdec"))
DIRECTORY /= "real-models"
"""The user's cache directory, which tests replace by their own later."""


def file_of(name: str) -> Path:
    """Return the path of a model; skip the test if the model was not downloaded."""
    path = DIRECTORY / FILES[name]
    if not path.is_file():
        pytest.skip(f"{path} is missing: run ./scripts/real_models.sh {name}")
    return path


@cache
def pair_of(name: str) -> Any:
    """Load a model once, in float32."""
    return load(file_of(name), dtype="float32", expand_weights=True)


@pytest.fixture(scope="session", params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def model(name: str) -> Path:
    return file_of(name)


@pytest.fixture(scope="session")
def pair(name: str) -> Any:
    return pair_of(name)


@pytest.fixture(scope="session")
def references(name: str) -> dict[str, Any]:
    """What make_references.py wrote."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))


def only(*names: str) -> pytest.MarkDecorator:
    """Run a test with some of the models."""
    return pytest.mark.parametrize("name", names, scope="session", indirect=True)
