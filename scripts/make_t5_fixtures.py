"""Write tests/fixtures/t5: tiny random T5 models and what transformers computes with them.

    python scripts/make_t5_fixtures.py tests/fixtures/t5

Needs torch and transformers (extra `train`); the tests that read the fixtures need neither.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
LENGTH = 150
KEPT_ROWS = 40
GATED, SILU = {"feed_forward_proj": "gated-gelu"}, {"feed_forward_proj": "gated-silu"}

# name: (family, settings, scale_decoder_outputs after construction, tie_word_embeddings after it)
KINDS: dict[str, tuple[str, dict[str, Any], bool | None, bool | None]] = {
    "tied-scaled-relu": ("t5", {"tie_word_embeddings": True}, None, None),
    "own-head-gated-gelu": ("t5", {"tie_word_embeddings": False, **GATED}, False, None),
    "own-head-scaled": ("t5", {"tie_word_embeddings": False}, True, None),
    "tied-unscaled": ("t5", {"tie_word_embeddings": True, **GATED}, False, None),
    "gated-silu": ("t5", {"tie_word_embeddings": True, **SILU}, None, None),
    "mt5": ("mt5", {"tie_word_embeddings": False, **GATED}, None, None),
    "umt5-tied": ("umt5", {**GATED}, None, True),
    "umt5-untied": ("umt5", {**GATED}, None, False),
    "deep-decoder": ("t5", {"num_layers": 1, "num_decoder_layers": 3}, None, None),
}
OWN_HEAD = ("own-head-gated-gelu", "own-head-scaled", "mt5", "umt5-untied")
FAMILIES = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}


def build(name: str) -> torch.nn.Module:
    """A random model of one kind, its weights large enough for peaked outputs."""
    family, settings, scales, tied = KINDS[name]
    config_class, model_class = FAMILIES[family]
    config = config_class(**{**SHAPE, **settings})
    if scales is not None:
        config.scale_decoder_outputs = scales
    model = model_class(config).eval()
    if tied is not None:
        model.config.tie_word_embeddings = tied
    if name in OWN_HEAD:
        # transformers 5 ties every T5 at construction, whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            spread = 0.8 if "relative_attention_bias" in key or "shared" in key else spread
            weight.copy_(spread * torch.randn(weight.shape, generator=generator))
            if weight.ndim == 1:
                weight.add_(1.0)
    return model


@torch.no_grad()
def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Inputs and outputs; log-probabilities of the first and last rows, to stay small.

    The padded source is the same text behind which 20 more tokens are masked.
    """
    generator = torch.Generator().manual_seed(7)
    source = torch.randint(2, 64, (1, LENGTH), generator=generator)
    target = torch.randint(2, 64, (1, LENGTH), generator=generator)
    target[0, 0] = 0
    mask = torch.ones_like(source)
    mask[0, -20:] = 0
    result = {"source": source[0].numpy(), "target": target[0].numpy()}
    for name, attention in (("", torch.ones_like(source)), ("padded_", mask)):
        out = model(input_ids=source, attention_mask=attention, decoder_input_ids=target)
        rows = out.logits[0].log_softmax(-1)
        rows = torch.cat([rows[:KEPT_ROWS], rows[-KEPT_ROWS:]])
        memory = out.encoder_last_hidden_state[0]
        result[f"{name}log_p"] = rows.numpy()
        result[f"{name}memory"] = torch.cat([memory[:10], memory[-30:-20]]).numpy()
    return result


def main(directory: Path) -> None:
    """Write every kind."""
    for name in KINDS:
        model = build(name)
        path = directory / name
        model.save_pretrained(path)
        with safe_open(path / "model.safetensors", "pt") as saved:
            if ("lm_head.weight" in saved.keys()) != (name in OWN_HEAD):  # noqa: SIM118
                sys.exit(f"{name}: the head was not saved as meant")
        (path / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(path / "expected.npz", **expected(model))
        print(f"{name}: {sum(p.numel() for p in model.parameters())} weights", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_t5_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
