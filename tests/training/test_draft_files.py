"""Trained networks of many families on disk: what is written is what is read again."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.training import draft as draft_files
from mlx_specdec.training.draft import Initial

from ..support import tiny
from ..support.pairs import FIXTURES
from ..support.t5 import t5_models

FAMILIES = ["llama", "gemma3_wrapped", "mixtral", "deepseek_v3", "mamba2", "falcon_h1", "lfm2"]


def source(name: str, tmp_path: Path) -> Path:
    return tiny.write(name, tmp_path / "model") if name in FAMILIES else FIXTURES / name


@pytest.mark.parametrize("name", [*FAMILIES, *t5_models()])
def test_every_family_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    directory = source(name, tmp_path)
    model = load_model(directory, dtype="float32").model
    draft = trainable(model)
    network = draft.network
    draft_files.round_as_stored(network)
    output = tmp_path / "output"
    output.mkdir()
    initial = Initial(model, read_config(directory), directory, "words")
    draft_files.write(output, network, initial, {"told": 1})
    again = load_model(output, dtype="float32").model
    inputs = draft.inputs([[3, 4, 5]], [[6, 7, 8]])
    found = trainable(again).logits(*inputs)
    assert mx.allclose(found, draft.logits(*inputs), atol=1e-4)
    expected = dict(tree_flatten(network.parameters()))
    for part, array in tree_flatten(again.network.parameters()):
        assert mx.array_equal(array, expected[part])
    assert json.loads((output / "provenance.json").read_text())["told"] == 1
