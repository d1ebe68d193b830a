"""A tiny random T5 with a tokenizer, as files that any release can load."""

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from ..support.tokenizers import unigram

WIDTH, INNER, HEADS, BUCKETS = 32, 64, 2, 32
LAYERS = {"encoder": 1, "decoder": 2}
END = 1
"""The token that ends a sequence."""


def shapes_of(stack: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the encoder or the decoder of a T5."""
    shapes: dict[str, tuple[int, ...]] = {f"{stack}.final_layer_norm.weight": (WIDTH,)}
    parts = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else [])]
    for block in range(LAYERS[stack]):
        for layer, part in enumerate([*parts, "DenseReluDense"]):
            name = f"{stack}.block.{block}.layer.{layer}"
            shapes[f"{name}.layer_norm.weight"] = (WIDTH,)
            if part == "DenseReluDense":
                shapes |= {f"{name}.{part}.wi.weight": (INNER, WIDTH)}
                shapes |= {f"{name}.{part}.wo.weight": (WIDTH, INNER)}
            else:
                shapes |= {f"{name}.{part}.{matrix}.weight": (WIDTH, WIDTH) for matrix in "qkvo"}
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {**shapes, bias: (BUCKETS, HEADS)}


def translator(directory: Path, seed: int = 0, extra: tuple[str, ...] = ()) -> Path:
    """Write a random T5 whose completions do not end at once. extra: Its last tokens."""
    tokenizer = unigram(directory, extra=extra) / "tokenizer.json"
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    config = {
        "model_type": "t5",
        "vocab_size": size,
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": INNER,
        "num_heads": HEADS,
        "num_layers": LAYERS["encoder"],
        "num_decoder_layers": LAYERS["decoder"],
        "relative_attention_num_buckets": BUCKETS,
        "decoder_start_token_id": 0,
        "eos_token_id": END,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {**shapes_of("encoder"), **shapes_of("decoder")}
    shapes |= {"shared.weight": (size, WIDTH), "lm_head.weight": (size, WIDTH)}
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {
        name: mx.random.normal(shape, key=key) * shape[-1] ** -0.5
        for (name, shape), key in zip(sorted(shapes.items()), keys, strict=True)
    }
    weights["lm_head.weight"][END] = 0
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    return directory
