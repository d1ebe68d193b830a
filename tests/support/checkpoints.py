"""Small checkpoints on disk, sound ones and damaged ones."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def t5_shapes(config: Mapping[str, Any], *, own_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a T5, by their names."""
    width, inner = config["d_model"], config["d_kv"] * config["num_heads"]
    shapes = {"shared.weight": (config["vocab_size"], width)}
    if own_head:
        shapes["lm_head.weight"] = shapes["shared.weight"]
    gated = config["feed_forward_proj"].startswith("gated")
    attentions = {"encoder": ["SelfAttention"], "decoder": ["SelfAttention", "EncDecAttention"]}
    for stack, kinds in attentions.items():
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
        layers = config["num_layers" if stack == "encoder" else "num_decoder_layers"]
        for block in range(layers or 0):
            at = f"{stack}.block.{block}.layer"
            for number in range(len(kinds) + 1):
                shapes[f"{at}.{number}.layer_norm.weight"] = (width,)
            for number, kind in enumerate(kinds):
                parts = dict.fromkeys("qkv", (inner, width)) | {"o": (width, inner)}
                shapes |= {f"{at}.{number}.{kind}.{name}.weight": s for name, s in parts.items()}
            if not block or config["model_type"] == "umt5":
                bias = config["relative_attention_num_buckets"], config["num_heads"]
                shapes[f"{at}.0.SelfAttention.relative_attention_bias.weight"] = bias
            for name in ["wi_0", "wi_1"] if gated else ["wi"]:
                shapes[f"{at}.{len(kinds)}.DenseReluDense.{name}.weight"] = (config["d_ff"], width)
            shapes[f"{at}.{len(kinds)}.DenseReluDense.wo.weight"] = (width, config["d_ff"])
    return shapes


def t5_weights(config: Mapping[str, Any], *, own_head: bool = False) -> dict[str, mx.array]:
    """Random float32 tensors of a T5."""
    shapes = t5_shapes(config, own_head=own_head)
    parts = mx.random.split(mx.random.key(7), len(shapes))
    return {
        name: mx.random.normal(shape, key=part)
        for (name, shape), part in zip(sorted(shapes.items()), parts, strict=True)
    }


def write_t5(
    directory: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    weights: dict[str, mx.array] | None = None,
    own_head: bool = False,
    tokenizer: bool = True,
) -> Path:
    """A T5 directory with one safetensors file and two files that stand for a tokenizer's."""
    config = {**T5, **(changes or {})}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tokenizer:
        (directory / "spiece.model").write_bytes(b"pieces")
        (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    save(directory / "model.safetensors", weights or t5_weights(config, own_head=own_head))
    return directory


def write_sharded_t5(directory: Path, shards: int = 3) -> Path:
    """The same T5 in several files with an index."""
    write_t5(directory)
    (directory / "model.safetensors").unlink()
    weights = t5_weights(T5)
    places: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(weights.items())[number::shards])
        save(directory / file, part)
        places.update(dict.fromkeys(part, file))
    write_index(directory, places)
    return directory


def write_index(directory: Path, places: Mapping[str, Any]) -> None:
    """model.safetensors.index.json."""
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def save(file: Path, weights: dict[str, mx.array]) -> None:
    """A safetensors file as torch's users have it."""
    mx.save_safetensors(str(file), weights, {"format": "pt"})


def raw_file(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with any header. length: The header's size in the file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def listing(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory: files with their bytes, directories with None."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def refusal(kind: Any, act: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the message with which a call fails, which has one line."""
    with pytest.raises(kind) as caught:
        act(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
