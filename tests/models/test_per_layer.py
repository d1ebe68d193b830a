"""Gemma 4's config.json as transformers 5.15 and later write it describes the same model."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from transformers import AutoConfig

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.foreign import spelled_old
from mlx_specdec.models.loading import load_model

from ..support.drafter_pairs import pair_of
from ..support.pairs import FIXTURES

GEMMA = FIXTURES.with_name("gemma4_assistant") / "dense"
PROMPT = [5, 9, 12, 7, 33, 21, 14, 2, 30, 11, 17]


def rewritten(directory: Path, source: Path) -> Path:
    """Copy a checkpoint, with config.json as transformers writes it."""
    shutil.copytree(source, directory)
    file = directory / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(directory)
    text = file.read_text()
    assert "per_layer_config" in text and "global" not in text
    return directory


def test_a_model_and_its_assistant_are_the_same_in_both_forms(tmp_path: Path) -> None:
    targets = [GEMMA / "target", rewritten(tmp_path / "target", GEMMA / "target")]
    assistants = [GEMMA / "assistant", rewritten(tmp_path / "assistant", GEMMA / "assistant")]
    models = [load_model(directory, dtype="float32").model for directory in targets]
    logits = [model.open_batch([PROMPT]).advance(mx.array([PROMPT])).logits for model in models]
    assert mx.array_equal(*logits)
    options = Options(max_tokens=12, num_draft=3, cost_cache=False)
    pairs = map(pair_of, models, assistants)
    results = [generate(pair, PROMPT, options) for pair in pairs]
    first, second = ((result.tokens, result.stats.accepted) for result in results)
    assert first == second


@pytest.mark.parametrize(
    "layers",
    [
        {"1": {"head_dim": 16}, "3": {"head_dim": 32}},
        {"1": {"intermediate_size": 64}},
        {"1": 16},
    ],
)
def test_layers_that_differ_otherwise_are_refused(layers: dict[str, Any]) -> None:
    config = {"text_config": {"model_type": "gemma4_text", "per_layer_config": layers}}
    with pytest.raises(CheckpointError, match="that mlx-lm does not read"):
        spelled_old(config)
    llama = {"model_type": "llama", "per_layer_config": layers}
    assert spelled_old(llama) == llama
