"""Tiny T5 networks and the fixtures of T5."""

from typing import Any

import mlx.core as mx

from mlx_specdec.models.t5 import T5, T5Config

from .pairs import FIXTURES

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
    network = T5(T5Config.from_dict({**SHAPE, **changes}, own_head=True))
    mx.eval(network.parameters())
    return network


def t5_models() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
