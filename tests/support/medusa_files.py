"""Tiny Medusa heads on disk, in either layout."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx


def tensors(
    count: int, layers: int, width: int, vocabulary: int | None, seed: int = 0
) -> dict[str, mx.array]:
    """Random heads; `vocabulary` gives each its own output layer."""
    keys = iter(mx.random.split(mx.random.key(seed), count * (2 * layers + 1)))
    found = {}
    for head in range(count):
        for layer in range(layers):
            weight = mx.random.normal((width, width), key=next(keys)) * width**-0.5
            found[f"{head}.{layer}.linear.weight"] = weight
            found[f"{head}.{layer}.linear.bias"] = 0.1 * mx.random.normal((width,), key=next(keys))
        if vocabulary is not None:
            output = mx.random.normal((vocabulary, width), key=next(keys)) * 2 * width**-0.5
            found[f"{head}.{layers}.weight"] = output
    return found


def write(
    directory: Path,
    base: str,
    *,
    count: int = 3,
    layers: int = 1,
    width: int = 32,
    vocabulary: int | None = None,
    **changes: Any,
) -> Path:
    """A directory of heads; `changes` override its config.json, None leaves an entry out."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": count,
        "medusa_num_layers": layers,
        "base_model_name_or_path": base,
        **changes,
    }
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (directory / "config.json").write_text(text, encoding="utf-8")
    mx.save_safetensors(
        str(directory / "medusa_lm_head.safetensors"), tensors(count, layers, width, vocabulary)
    )
    return directory
