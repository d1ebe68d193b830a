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

DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

GEMMA3: dict[str, Any] = {
    **DENSE,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama"},
    # Every layer but the last sees only a window.
    "llama_sliding": {
        **DENSE,
        "model_type": "llama",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "qwen2": {**DENSE, "model_type": "qwen2"},
    "qwen3": {**DENSE, "model_type": "qwen3"},
    "phi3": {**DENSE, "model_type": "phi3"},
    "mixtral": {**DENSE, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {**DENSE, **EXPERTS, "model_type": "qwen3_moe"},
    "gemma3": GEMMA3,
    # The wrapper of the multimodal checkpoints, used for text.
    "gemma3_wrapped": {
        "model_type": "gemma3",
        "vocab_size": VOCABULARY,
        "eos_token_id": [1, 2],
        "text_config": GEMMA3,
    },
    "gpt_oss": {
        **DENSE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "eos_token_id": 1,
    },
    "qwen3_next": {
        **DENSE,
        **EXPERTS,
        **LINEAR,
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        **DENSE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Recurrent and attention state side by side in every layer (CacheList).
    "falcon_h1": {
        **DENSE,
        "model_type": "falcon_h1",
        "mamba_d_ssm": 32,
        "mamba_d_head": 8,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    },
    # Recurrent layers and window layers in one model.
    "recurrent_gemma": {
        **DENSE,
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    # Attention in chunks, with a cache that drops its front (ChunkedKVCache).
    "llama4": {
        "model_type": "llama4",
        "eos_token_id": 1,
        "text_config": {
            **DENSE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "lfm2": {
        **DENSE,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}


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
