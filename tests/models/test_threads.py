"""A model that one thread has loaded can be used in any other, also when the first has ended."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_specdec import system
from mlx_specdec.models.base import Base
from mlx_specdec.models.cpu_layers import lighten
from mlx_specdec.models.loading import load_model

from ..support import tiny
from ..support.families import config_of
from ..support.pairs import PROMPT

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {**tiny.CONFIGS["llama"], "rope_scaling": LLAMA3},
    "yarn": {**tiny.CONFIGS["qwen3"], "rope_scaling": YARN},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: tiny.CONFIGS[name] for name in ("llama", "gemma3", "gpt_oss", "mamba2", "qwen3_next")},
    **ROPES,
    # A pass of these models replaces some of their arrays.
    **{name: config_of(name) for name in ("gemma3n", "plamo3")},
}


def in_a_new_thread(work: Callable[[], Any]) -> Any:
    """Return the result of a function; the thread that runs it has ended."""
    with ThreadPoolExecutor(1, initializer=system.clear_at_end) as thread:
        return thread.submit(work).result()


def write(config: dict[str, Any], directory: Path) -> Path:
    weights = dict(tree_flatten(tiny.from_config(config).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def logits(model: Base) -> list[list[list[float]]]:
    """Return the logits of one row, whose positions begin at 0, and of several rows."""
    contexts = [model.open_batch([[1]]), model.open_batch([PROMPT])]
    fed = [mx.array([[1]]), mx.array([PROMPT])]
    return [
        context.advance(tokens).logits.tolist()[0]
        for context, tokens in zip(contexts, fed, strict=True)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same_in_another_thread(tmp_path: Path, name: str) -> None:
    directory = write(FAMILIES[name], tmp_path)
    model = in_a_new_thread(lambda: load_model(directory).model)
    expected = logits(load_model(directory).model)
    assert logits(model) == expected
    assert in_a_new_thread(lambda: logits(model)) == expected


def test_a_thread_takes_over_nothing_that_an_ended_thread_has_not_computed() -> None:
    """A new thread often gets the number of one that has ended."""
    rope, heads = nn.RoPE(8), mx.ones((1, 2, 1, 8))
    lighten(nn.Sequential(rope))
    mx.eval(heads)
    for _ in range(8):
        in_a_new_thread(lambda: rope(heads))
        assert in_a_new_thread(lambda: rope(heads).tolist()) == heads.tolist()
