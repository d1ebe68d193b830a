"""Our networks' weights under the names that transformers saved them with."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.compare import (
    settings,
    weights,
)
from mlx_specdec.checkpoints import files
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures"


def network(name: str, **fields: int):
    return load_model(FIXTURES / name, dtype="float32", **fields).model.network


def stored(name: str) -> dict[str, np.ndarray]:
    read = mx.load(str(FIXTURES / name / "model.safetensors"))
    return {key: np.array(array.astype(mx.float32)) for key, array in read.items()}


def shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize(
    "name", ["t5/own-head-scaled", "t5/tied-unscaled", "t5/umt5-untied", "torch/llama"]
)
def test_weights_have_the_names_and_values_that_transformers_saved(name: str) -> None:
    found, saved = weights(network(name)), stored(name)
    assert found.keys() == saved.keys()
    assert all(np.array_equal(found[key], saved[key]) for key in found)


def test_packed_weights_come_unpacked() -> None:
    found, saved = weights(network("torch/llama", q_bits=8, q_group_size=32)), stored("torch/llama")
    assert shapes(found) == shapes(saved)
    assert all(array.dtype == np.float32 for array in found.values())
    for key, array in found.items():
        assert np.abs(array - saved[key]).max() < 0.02 * np.abs(saved[key]).max()


@pytest.mark.parametrize(
    ("name", "scales"), [("own-head-scaled", True), ("tied-unscaled", False), ("mt5", False)]
)
def test_the_scaling_is_said_where_transformers_looks_for_it(name: str, scales: bool) -> None:
    config = {
        **files.read_config(FIXTURES / "t5" / name),
        "quantization": {"bits": 4, "group_size": 64},
        "auto_map": {"AutoModel": "code.Model"},
    }
    report = settings(config, network(f"t5/{name}"))
    assert report["tie_word_embeddings"] is scales
    assert not report.keys() & {"quantization", "auto_map", "scale_decoder_outputs"}
