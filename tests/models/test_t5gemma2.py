"""Memory, images and numbers of T5Gemma 2. tests/contract/ compares it with transformers."""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import PromptError
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5gemma2"


GROUPED = "grouped"


def test_the_token_of_an_image_is_refused_and_the_vision_tower_left_out(tmp_path) -> None:
    directory = shutil.copytree(FIXTURES / GROUPED, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "image_token_index": 62}))
    loaded = load_model(directory, dtype="float32")
    assert "vision tower" in loaded.note
    with pytest.raises(PromptError, match="image"):
        loaded.model.open_batch([[5, 62, 7]])


def test_the_factor_of_the_embedding_is_rounded_to_the_models_numbers() -> None:
    network, tokens = load_model(FIXTURES / GROUPED, dtype="bfloat16").model.network, mx.arange(60)
    rows, root = network.model.encoder.embed_tokens(tokens), math.sqrt(network.width)
    assert mx.array_equal(network.embed(tokens), rows * mx.array(root, dtype=mx.bfloat16))
    exact = (rows.astype(mx.float32) * root).astype(mx.bfloat16)
    assert not mx.array_equal(network.embed(tokens), exact)
