"""Quantized directories of mlx-lm, their end tokens, and hidden states in several threads."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny


def load(directory: Path, **settings: Any) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    loaded = load_model(directory, **settings)
    return loaded.model, loaded.eos_token_ids, loaded.dtype


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


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
