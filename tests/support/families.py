"""A tiny configuration of every family that mlx-lm has."""

import importlib
import inspect
from typing import Any

from . import tiny

_ROPE = {"rope_type": "default", "type": "default", "rope_theta": 10000.0, "factor": 1.0}
_YARN = {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
SMALL: dict[str, Any] = {
    **tiny.DENSE,
    **tiny.EXPERTS,
    # The same sizes under the names of other families.
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim", "model_dim", "block_dim"), 32),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("n_positions", "n_ctx", "block_size", "model_max_length"), 512),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "ff_intermediate_size"), 48),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("norm_eps", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "conv_bias"), False),
    "rope_scaling": None,
    "rope_parameters": _ROPE,
    "use_qk_norm": True,
    # Experts.
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("topk_group", "n_group", "moe_layer_freq", "first_k_dense_replace"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    "expert_ffn_hidden_size": 32,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "is_moe_layer": [False, True],
    # Attention over a compressed cache, and what selects of it.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_topk"), 4),
    "index_n_heads": 2,
    # Windows.
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window_pattern": 2,
    "sliding_window_layers": [1],
    **dict.fromkeys(("sliding_window", "sliding_window_size"), tiny.WINDOW),
    **dict.fromkeys(("window_size", "attention_window_size", "loop_window_size"), tiny.WINDOW),
    # Layers that take embeddings of their own.
    "vocab_size_per_layer_input": tiny.VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "global_head_dim": 8,
    # Recurrent layers.
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "group_norm_size"), 1),
    **dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias", "use_conv_bias"), False),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand", "conv_window", "layer_group_size"), 2),
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "mamba_d_ssm": 32,
    "mamba_chunk_size": 8,
    "conv_L_cache": 3,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 4,
    # Factors: of published sizes, they would drown a tiny model's logits.
    **dict.fromkeys(("logits_scaling", "residual_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("logit_scale", "lm_head_multiplier", "scale_emb", "scale_depth"), 1.0),
    "attention_multiplier": 0.35,
    "query_pre_attn_scalar": 8,
    "dim_model_base": 32,
    "partial_rotary_factor": 0.5,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
}
_KDA = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
}
_WINDOWS_AND_ALL = dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)
_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_num": 1}
_LFM2_MOE = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}


# Entries of a family besides SMALL.
OWN: dict[str, dict[str, Any]] = {
    **{config["model_type"]: config for config in tiny.CONFIGS.values()},
    "llama": {"layer_types": None},
    "afm7": {"num_kv_reuse_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"factor": 1.0}},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma3n": {
        "text_config": {
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0.0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
        }
    },
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    },
    "kimi_k3": {"text_config": {"linear_attn_config": _KDA, "num_experts_per_token": 2}},
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2-vl": {"text_config": {**tiny.CONFIGS["lfm2"]}},
    "lfm2_moe": {"use_expert_bias": True, **_LFM2_MOE},
    "lille-130m": {"n_embd": 64},
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", **_LONGCAT},
    "longcat_flash_ngram": _LONGCAT,
    "mellum": {"rope_parameters": _WINDOWS_AND_ALL},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "n_shared_experts": None,
        **dict.fromkeys(("add_swa_attention_sink_bias", "add_full_attention_sink_bias"), True),
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 8),
    },
    "minicpm3": {"rope_scaling": _ROPE},
    "minimax_m3_vl": {
        "text_config": {"moe_layer_freq": [0, 1], "dense_intermediate_size": 48},
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 0.1}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.1}},
        ]
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 1.0],
    },
    "phixtral": {"num_vocab": tiny.VOCABULARY, "num_heads": 2},
    "phi3small": {
        # The ids that it masks are written down in mlx-lm.
        "vocab_size": 100_352,
        "hidden_size": 16,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "mup_use_scaling": False,
    },
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8},
    "spark2_5": {"rope_parameters": _WINDOWS_AND_ALL},
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
}
NOT_TINY = {
    "bitnet": "its layers are Metal kernels",
    "muse_spark": "its attention is a Metal kernel",
    "olmo": "it is made by a package of its own, ai2-olmo",
    "prism_hadamard_qwen35": "its weights are packed in blocks of 512 at least",
}
DIFFERENT = {
    "phi3small": "mlx-lm adds a mask of True and False to the scores of its passes of several rows",
}
"""Decoded plainly, with a warning."""
ONE_AT_A_TIME = {
    **dict.fromkeys(("afm7", "gpt_bigcode", "phi3small"), "one position or mask for all sequences"),
    **dict.fromkeys(("deepseek_v41", "llama4"), "caches of their own"),
    "longcat_flash_ngram": "the state of short sequences is shorter",
    "recurrent_gemma": "the first token is normalized in another way",
}
"""Families that decode one sequence at a time, and why."""


def config_of(name: str) -> dict[str, Any]:
    arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    parameters = inspect.signature(arguments).parameters
    changes = {"model_type": name, **OWN.get(name, {})}
    if "text_config" in parameters:
        changes["text_config"] = {**SMALL, "model_type": name, **changes.get("text_config", {})}
    # mlx-lm inspects the signature again for each key of a config.
    small = {key: value for key, value in SMALL.items() if key in parameters}
    return {**small, **changes}
