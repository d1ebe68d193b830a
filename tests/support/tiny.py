"""Tiny random decoder-only models of many families, as mlx-lm's own classes.

The same name and seed always give the same weights, whatever ran before, and mlx's global random
state is left as it was. Weights are scaled so that greedy text wanders instead of repeating.
"""

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

VOCABULARY = 64
WINDOW = 8
DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configs.json").read_text())
"""Entries of config.json by table and family. The entry + names parts that other entries change."""


def complete(entry: Any, parts: dict[str, Any] = DATA["parts"]) -> Any:
    """Return an entry of a table with the parts that it names."""
    if not isinstance(entry, dict):
        return entry
    whole: dict[str, Any] = {}
    for name in entry.get("+", "").split():
        whole |= parts[name]
    return whole | {key: complete(value, parts) for key, value in entry.items() if key != "+"}


CONFIGS: dict[str, dict[str, Any]] = complete(DATA["tiny"])
"""Of llama_sliding, every layer but the last sees only a window. gemma3_wrapped is the text of a
multimodal checkpoint. Others have recurrent states, attention in chunks, or a mixture."""


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The family's model with random float32 weights; `changes` override its config."""
    return from_config(_config(name, changes), seed)


def from_config(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """The model that mlx-lm makes of this config, with random float32 weights."""
    classes = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    high, low = mx.random.state[0].tolist()
    try:
        model = classes.Model(classes.ModelArgs.from_dict(config))
    finally:
        mx.random.seed((high << 32) + low)
    return randomized(model, seed)


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random float32 weights."""
    leaves = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(leaves))
    # A tied head repeats its input unless the embeddings are small.
    tied = not any("head" in path for path, _ in leaves)
    weights = [
        (path, _random(path, array, key, tied))
        for (path, array), key in zip(leaves, keys, strict=True)
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def write(name: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """The same model as a directory that can be loaded: config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(name, changes)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = dict(tree_flatten(build(name, seed, **changes).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def _config(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {**copy.deepcopy(CONFIGS[name]), **changes}


def _random(path: str, array: mx.array, key: mx.array, tied: bool) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if path.endswith("A_log"):
        return mx.log(mx.random.uniform(1.0, 8.0, array.shape, key=key))
    if path.endswith("recurrent_param"):
        return mx.random.uniform(-4.0, 0.0, array.shape, key=key)
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim < 2:
        norm = "norm" in path or any(part.startswith("ln") for part in path.split("."))
        mean = array if norm or path.endswith((".D", "dt_bias", "_g")) else mx.zeros_like(array)
        return mean.astype(mx.float32) + 0.1 * noise
    if "conv" in path and array.ndim == 3:
        return 0.5 * noise
    gain = 2.0 if "head" in path else 2.5
    if "embed" in path:
        return (0.4 if tied else 1.0) * noise
    return gain * array.shape[-1] ** -0.5 * noise
