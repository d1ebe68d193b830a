"""What `speculators` leaves out of the configuration of a layer for multi-token prediction: the
defaults of transformers, by mlx-lm's name of the family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN = "qwen3"
"""Of `speculators` alone: a family whose checkpoints carry no such layers."""
_QWEN3: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "vocab_size": 151936,
    "head_dim": 128,
    "rope_theta": 10000.0,
}
_HYBRID: Mapping[str, Any] = {
    **_QWEN3,
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen3_next": {
        **_HYBRID,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5": {
        **_HYBRID,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe": {
        **_HYBRID,
        "vocab_size": 248320,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}
