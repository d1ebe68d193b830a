"""Tiny models with real tokenizers on disk, and adapters for them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from mlx_specdec.models.t5 import T5, T5Config
from mlx_specdec.text.tokenizer import load_tokenizer

from ..contract.translators import translator as make_t5  # noqa: F401
from . import tiny
from .tokenizers import byte_level


def make_llama(directory: Path, seed: int = 0, padding: int = 0, **settings: object) -> Path:
    """A random Llama with a real tokenizer. padding: columns of its logits that are no tokens."""
    size = load_tokenizer(byte_level(directory, **settings), kind="decoder-only").size
    tiny.write("llama", directory, seed, vocab_size=size + padding)
    return directory


def moved(source: Path, target: Path, amount: float = 0.05) -> Path:
    """The same model, its weights moved a little: a draft that is often right."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = dict(mx.load(str(source / "model.safetensors")))
    near = {name: array * (1 + amount * mx.sin(100 * array)) for name, array in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), near)
    return target


LORA = {"rank": 4, "scale": 10.0, "dropout": 0.5}


def write_adapter(base: Path, directory: Path, kind: str = "lora", **changes: Any) -> Path:
    """Write an adapter as mlx-lm's training does, with random weights."""
    directory.mkdir()
    report = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": LORA, **changes}
    (directory / "adapter_config.json").write_text(json.dumps(report))
    model, _ = load_model(base)
    if kind != "full":
        model.freeze()
        linear_to_lora_layers(model, 2, LORA, use_dora=kind == "dora")
    names = sorted(name for name, _ in tree_flatten(model.trainable_parameters()))
    arrays = dict(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(3), len(names))
    weights = {
        name: arrays[name] + 0.05 * mx.random.normal(arrays[name].shape, key=key)
        for name, key in zip(names, keys, strict=True)
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    return directory


SHAPE: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "num_layers": 2,
    "feed_forward_proj": "gated-gelu",
}
SOURCE = [5, 6, 7, 1]
TOKENS = mx.array([[0, 3, 9, 4, 33, 7]])


def built(**changes: Any) -> T5:
    mx.random.seed(1)
    network = T5(T5Config({**SHAPE, **changes}), own_head=True)
    mx.eval(network.parameters())
    return network
