"""Quantized directories of mlx-lm, their end tokens, and hidden states in several threads."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.models import number_format
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import read


def load(directory: Path, **settings: Any) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    loaded = load_model(directory, **settings)
    return loaded.model, loaded.eos_token_ids, loaded.dtype


def logits_of(model: DecoderOnlyModel, tokens: list[int]) -> np.ndarray:
    context = read(model, tokens)
    return np.array(context.advance(mx.array([tokens[-1:]])).logits.astype(mx.float32))


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("large", [True, False])
def test_a_quantized_directory_loads_as_stored_or_expanded_on_the_cpu(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(number_format, "EXPANDED_SHARE", 0)
    directory = tiny.write("llama", tmp_path)
    model, _, _ = load(directory, q_bits=4, q_group_size=32)
    weights = dict(tree_flatten(model.network.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    edit_config(directory, quantization={"group_size": 32, "bits": 4})
    again, _, dtype = load(directory)
    expanded = number_format.on_cpu() and not large
    assert dtype == ("float32" if expanded else "4-bit, float32")
    np.testing.assert_allclose(logits_of(again, [5, 9]), logits_of(model, [5, 9]), atol=1e-4)
    with pytest.raises(OptionError, match="quantized already"):
        load(directory, q_bits=4)


def test_end_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    directory = tiny.write("llama", tmp_path)
    generation = directory / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 9]}')
    assert load(directory)[1] == (7, 9)
    generation.write_text('{"eos_token_id": 0}')
    assert load(directory)[1] == (0,)
    generation.write_text("{}")
    assert load(directory)[1] == (1,)
    edit_config(directory, eos_token_id=None)
    assert load(directory)[1] == ()
    generation.write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        load(directory)
