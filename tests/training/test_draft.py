"""The files of a trained draft model, and the divergence that it is trained on."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.training import draft as draft_files
from mlx_specdec.training.draft import log_probabilities
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


def test_tokens_without_any_probability_do_no_harm() -> None:
    random = np.random.default_rng(0)
    target, draft = (random.normal(0, 2, (3, 7)) for _ in range(2))
    target[:, 0] = draft[:, 1] = -np.inf

    def divergence(draft: mx.array) -> mx.array:
        target_log_p = log_probabilities(mx.array(target))
        return nn.losses.kl_div_loss(log_probabilities(draft), target_log_p, reduction="sum")

    value, gradient = mx.value_and_grad(divergence)(mx.array(draft))
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
