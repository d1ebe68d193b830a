"""Adapters that mlx-lm has trained give what mlx-lm computes with them, or one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_adapters, load_model

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models import loading

from ..support import tiny
from ..support.models import LORA, write_adapter
from ..support.pairs import PROMPT, pair_of


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.write("llama", tmp_path / "base", hidden_size=64, intermediate_size=64)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(base, tmp_path / "adapter")


def logits(network: nn.Module) -> np.ndarray:
    return np.array(network(mx.array([PROMPT])))


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_an_adapter_computes_what_mlx_lm_computes(base: Path, tmp_path: Path, kind: str) -> None:
    directory = write_adapter(base, tmp_path / "adapter", kind)
    reference, _ = load_model(base)
    without = logits(reference)
    load_adapters(reference, str(directory))
    reference.eval()
    adapted = loading.load_model(base, adapter=directory).model.network
    assert np.abs(logits(adapted) - logits(reference)).max() < 1e-5
    assert np.abs(logits(adapted) - without).max() > 0.01


@pytest.mark.parametrize("q_bits", [None, 8])
def test_speculation_keeps_the_text_of_an_adapted_target(
    base: Path, adapter: Path, q_bits: int | None
) -> None:
    target = loading.load_model(base, adapter=adapter, q_bits=q_bits).model
    settings = {"max_tokens": 30, "temperature": 1.0, "seed": 5}
    plain = generate(pair_of(target, None), PROMPT, Options(regular=True, **settings))
    draft = loading.load_model(base).model
    drafted = generate(pair_of(target, draft), PROMPT, Options(num_draft=3, **settings))
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0


def cut(directory: Path) -> None:
    file = directory / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def without_one(directory: Path) -> None:
    file = str(directory / "adapters.safetensors")
    weights = mx.load(file)
    mx.save_safetensors(file, {n: w for n, w in weights.items() if n != min(weights)})


def of_other_rank(directory: Path) -> None:
    config = {"num_layers": 2, "lora_parameters": {**LORA, "rank": 8}}
    (directory / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "adapter_config.json cannot be read"),
        (lambda d: (d / "adapters.safetensors").unlink(), "it has no adapters.safetensors"),
        (of_other_rank, "does not fit the model .*shape"),
        (cut, "adapters.safetensors"),
        (
            without_one,
            r"lacks 1 of the adapter's tensors, such as model.layers.0.mlp.down",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_reported_in_one_line(
    base: Path, adapter: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(adapter)
    with pytest.raises(CheckpointError, match=says) as problem:
        loading.load_model(base, adapter=adapter)
    assert "\n" not in str(problem.value)
