"""The number formats in which models are loaded, and what a loaded model needs."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import bitnet

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models import number_format
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.t5 import T5, T5Config

from ..support import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A T5 whose widths divide into groups of 32, with its own head."""
    config = json.loads((FIXTURES / "own-head-scaled" / "config.json").read_text())
    config.update(d_model=64, d_kv=32, d_ff=96)
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = T5(T5Config(config), own_head=True)
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), dict(tree_flatten(network.parameters()))
    )
    return tmp_path


def logits(model: EncoderDecoderModel) -> np.ndarray:
    scores = model.open_batch([[5, 6, 7, 1]]).advance(mx.array([[0, 9, 11]]))
    return np.array(scores.logits.astype(mx.float32))


def rewrite(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(file), weights)


def test_quantizing_on_load_leaves_positions_and_norms_alone(wide: Path) -> None:
    exact = logits(load_model(wide).model)
    loaded = load_model(wide, q_bits=8, q_group_size=32)
    network = loaded.model.network
    attention = network.encoder.block[0].layer[0].SelfAttention
    assert isinstance(attention.q, nn.QuantizedLinear)
    assert isinstance(network.shared, nn.QuantizedEmbedding)
    assert isinstance(attention.relative_attention_bias, nn.Embedding)
    assert loaded.dtype == "8-bit, float32"
    assert 0 < np.abs(logits(loaded.model) - exact).max() < 0.1


LARGE = "encoder.block.0.layer.1.DenseReluDense.wo.weight"


@pytest.mark.parametrize(
    ("family", "large"),
    [
        *((f"t5/{kind}", LARGE) for kind in ("own-head-scaled", "mt5", "umt5-untied")),
        ("t5gemma2/grouped", "model.encoder.layers.0.post_feedforward_layernorm.weight"),
    ],
)
def test_hidden_states_beyond_float16_are_computed_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, large: str
) -> None:
    shutil.copytree(FIXTURES.parent / family, tmp_path, dirs_exist_ok=True)

    def half(weights) -> None:
        weights[large] = weights[large] * (6e4 / mx.abs(weights[large]).max())
        weights.update({name: array.astype(mx.float16) for name, array in weights.items()})

    rewrite(tmp_path, half)
    assert "float16" not in load_model(tmp_path).note
    exact = logits(load_model(tmp_path).model)
    monkeypatch.setattr(number_format, "on_cpu", lambda: False)
    loaded = load_model(tmp_path)
    assert loaded.dtype == "bfloat16"
    assert np.abs(logits(loaded.model) - exact).max() < 0.04 * np.abs(exact).max()
    assert "float16 keeps float16" in loaded.note and "\n" not in loaded.note
    wished = load_model(tmp_path, dtype="float16")
    assert wished.dtype == "float16" and "float16" not in wished.note
    assert not np.isfinite(logits(wished.model)).all()


@pytest.mark.cpu_only
@pytest.mark.skipif(mx.metal.is_available(), reason="these kernels are here")
def test_a_family_that_runs_on_metal_only_is_reported(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "model_type": "bitnet", "tie_word_embeddings": True}
    network = bitnet.Model(bitnet.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="on Metal only") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
