"""Write tests/fixtures/t5-families: a tiny checkpoint for each family of T5 as people download it.

    python scripts/make_t5_family_fixtures.py tests/fixtures/t5-families

Names of tensors, entries of config.json and file formats are those of the real checkpoints, sizes
are not. expected.npz holds what transformers' modules compute with the same weights. Needs torch
and transformers (extra `train`); the tests that read the fixtures need neither.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_heads": 2}
COMMON: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "use_cache": True,
}
FIRST: dict[str, Any] = {"architectures": ["T5WithLMHeadModel"], "model_type": "t5"}
T5: dict[str, Any] = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FLAGS: dict[str, Any] = {"dense_act_fn": "gelu_new", "is_gated_act": True, "output_past": True}
TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
CROSS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
CLASSES = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}


@dataclass(frozen=True)
class Family:
    """config: what config.json says besides SIZES and COMMON. tied: the head is the embedding, and
    the decoder's output is scaled. copies: names under which shared.weight is stored again.
    cross: an unused bias is stored. kind: of the file. shards: how many."""

    config: dict[str, Any]
    tied: bool
    copies: tuple[str, ...] = TWINS
    cross: bool = False
    kind: str = "zip"
    shards: int = 1
    dtype: torch.dtype = torch.float32
    layers: dict[str, int] = field(default_factory=lambda: {"num_layers": 2})


FAMILIES = {
    # 2019: no word on the decoder's depth, its network or the head; every copy is in the file.
    "t5": Family(
        {**FIRST, "n_positions": 512, "output_past": True, "task_specific_params": {}},
        tied=True,
        copies=(*TWINS, "lm_head.weight"),
        cross=True,
        kind="old",
    ),
    "t5-v1_1": Family(
        {**T5, **GATED, "output_past": True},
        tied=False,
        layers={"num_layers": 2, "num_decoder_layers": 2},
    ),
    "flan-t5": Family(
        {**T5, **GATED, **FLAGS, "n_positions": 512, "relative_attention_max_distance": 128},
        tied=False,
        kind="safetensors",
    ),
    "mt5": Family(
        {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", **GATED},
        tied=False,
    ),
    "umt5": Family(
        {
            "architectures": ["UMT5ForConditionalGeneration"],
            "model_type": "umt5",
            **GATED,
            **FLAGS,
            "scalable_attention": True,
        },
        tied=False,
    ),
    "byt5": Family(
        {**T5, **GATED, "vocab_size": 384, "tokenizer_class": "ByT5Tokenizer"},
        tied=False,
        layers={"num_layers": 3, "num_decoder_layers": 1},
    ),
    "flan-ul2": Family(
        {**T5, **FLAGS, "dense_act_fn": "silu", "feed_forward_proj": "gated-silu"}
        | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
        tied=False,
        kind="safetensors",
        shards=3,
        dtype=torch.bfloat16,
    ),
    "t5-efficient": Family(
        {**T5, "feed_forward_proj": "relu", "num_heads": 1, "torch_dtype": "float32"},
        tied=True,
        copies=(*TWINS, "lm_head.weight"),
        cross=True,
        layers={"num_layers": 1, "num_decoder_layers": 3},
    ),
    "codet5": Family(
        {**T5, "bos_token_id": 1, "eos_token_id": 2, "feed_forward_proj": "relu"}
        | {"gradient_checkpointing": False, "vocab_size": 335, "task_specific_params": {}},
        tied=True,
        copies=(*TWINS, "lm_head.weight"),
        cross=True,
    ),
}


def build(name: str, family: Family) -> tuple[dict[str, Any], torch.nn.Module]:
    """config.json, and a random model whose numbers fit the type it is stored in."""
    written = {**SIZES, **COMMON, **family.layers, **family.config}
    config_class, model_class = CLASSES[written["model_type"]]
    model = model_class(config_class(**{**written, "dropout_rate": 0.0})).eval()
    # transformers 5 derives neither from config.json as it did when these were trained.
    model.config.tie_word_embeddings = model.config.scale_decoder_outputs = family.tied
    if not family.tied:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            spread = 0.8 if "relative_attention_bias" in key or "shared" in key else spread
            weight.copy_(spread * torch.randn(weight.shape, generator=generator))
            if weight.ndim == 1:
                weight.add_(1.0)
            weight.copy_(weight.to(family.dtype))
    return written, model


def tensors(family: Family, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Under the names of the real files."""
    found = {key: weight.detach().to(family.dtype) for key, weight in model.named_parameters()}
    found |= dict.fromkeys(family.copies, found["shared.weight"])
    if family.cross:
        found[CROSS] = torch.full((32, model.config.num_heads), 3.0)
    return found


@torch.no_grad()
def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Log-probabilities of a text given another."""
    generator = torch.Generator().manual_seed(7)
    source = torch.randint(2, 64, (1, 40), generator=generator)
    target = torch.randint(2, 64, (1, 20), generator=generator)
    target[0, 0] = 0
    rows = model(input_ids=source, decoder_input_ids=target).logits[0].log_softmax(-1)
    return {"source": source[0].numpy(), "target": target[0].numpy(), "log_p": rows.numpy()}


def write(directory: Path, family: Family, weights: dict[str, torch.Tensor]) -> None:
    """One file, or shards with an index. Only torch's archives can hold a tensor once for all of
    its names."""
    if family.kind != "safetensors":
        torch.save(
            weights,
            directory / "pytorch_model.bin",
            _use_new_zipfile_serialization=family.kind == "zip",
        )
        return
    weights = {key: weight.clone() for key, weight in weights.items()}
    if family.shards == 1:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number in range(family.shards):
        part = dict(sorted(weights.items())[number :: family.shards])
        file = f"model-{number + 1:05d}-of-{family.shards:05d}.safetensors"
        save_file(part, directory / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(root: Path) -> None:
    """Write every family."""
    for name, family in FAMILIES.items():
        written, model = build(name, family)
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "config.json", written)
        write(directory, family, tensors(family, model))
        np.savez_compressed(directory / "expected.npz", **expected(model))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_t5_family_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
