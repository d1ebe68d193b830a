"""The files of a trained draft model, and the divergence that it is trained on."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.training import draft as draft_files
from mlx_specdec.training.draft import forward, log_probabilities
from mlx_specdec.training.fit import round_as_stored

from ..support import tiny
from ..support.pairs import FIXTURES

BARTS = ("bart", "marian-two-vocabularies")
OTHERS = ["../t5gemma2/grouped", *(f"../bart/{name}" for name in BARTS)]
FAMILIES = ["llama", "gemma3_wrapped", "mixtral", "mamba2"]


def source(name: str, tmp_path: Path) -> Path:
    return tiny.write(name, tmp_path / "model") if name in FAMILIES else FIXTURES / name


@pytest.mark.parametrize("name", [*FAMILIES, "own-head-scaled", "tied-scaled-relu", *OTHERS])
def test_every_family_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    directory = source(name, tmp_path)
    model = load_model(directory, dtype="float32").model
    draft = trainable(model)
    network = draft.network
    round_as_stored(network)
    output = tmp_path / "output"
    output.mkdir()
    draft_files.write(output, {"told": 1}, network, read_config(directory), directory)
    again = load_model(output, dtype="float32").model
    inputs = draft.inputs([[3, 4, 5]], [[6, 7, 8]])
    found = trainable(again).logits(*inputs)
    assert mx.allclose(found, draft.logits(*inputs), atol=1e-4)
    expected = dict(tree_flatten(network.parameters()))
    for part, array in tree_flatten(again.network.parameters()):
        assert mx.array_equal(array, expected[part])
    assert json.loads((output / "provenance.json").read_text())["told"] == 1


# Values and gradients of the divergence


ROWS, SIZE = 3, 7


def logits(seed: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, SIZE))


def distribution(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def measured(target: np.ndarray, draft: mx.array) -> mx.array:
    return forward(log_probabilities(mx.array(target)), log_probabilities(draft))


def test_values_are_those_of_the_formula() -> None:
    p, q = distribution(logits(0)), distribution(logits(1))
    found = measured(logits(0), mx.array(logits(1)))
    np.testing.assert_allclose(np.array(found), (p * np.log(p / q)).sum(axis=-1), atol=1e-5)
    same = measured(logits(0), mx.array(logits(0)))
    np.testing.assert_allclose(np.array(same), np.zeros(ROWS), atol=1e-6)


def test_tokens_without_any_probability_do_no_harm() -> None:
    target, draft = logits(4), logits(5)
    target[:, 0] = draft[:, 1] = -np.inf
    value, gradient = mx.value_and_grad(lambda q: measured(target, q).sum())(mx.array(draft))
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
