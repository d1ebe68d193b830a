"""A published model, which scripts/real_models.sh has downloaded, and what others make of it."""

import json
from pathlib import Path
from typing import Any

import pytest

# These names load the fast BLAS before MLX, without which the tests take ten times as long.
from mlx_specdec import Pair, load, process

MODEL = process.directory("real-models") / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the user's cache directory, which tests replace by their own later."""


@pytest.fixture(scope="session")
def model() -> Path:
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is missing: run ./scripts/real_models.sh smollm2")
    return MODEL


@pytest.fixture(scope="session")
def pair(model: Path) -> Pair:
    return load(model, dtype="float32", expand_weights=True)


@pytest.fixture(scope="session")
def references() -> dict[str, Any]:
    """What make_references.py wrote."""
    return json.loads((Path(__file__).parent / "smollm2.json").read_text(encoding="utf-8"))
