"""Which decoder-only architectures are read of GGUF files, and what llama.cpp does to each: data.

A family is here when mlx-lm has it, llama.cpp's converter is known to leave its tensors as they are
but for what the table says, and a test holds its logits to those of the same weights in mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layout import COUNT, FLAG, NUMBER, Kind


@dataclass(frozen=True)
class Family:
    """What one architecture has.

    model_type, architecture: Hugging Face's names. stated: key of config.json -> key of the
    metadata and its kind, beside the sizes that all have. constant: what the metadata do not say.
    epsilon: what config.json calls that of the norms. permuted: llama.cpp stores the rows of its
    rotary heads in the order of Meta's code. shifted: it stores 1 + w for the weights w of norms.
    partial: a part of each head's width may be rotated. scales: mlx-lm can scale its rotary
    positions. largest: layers of the size whose attention is scaled by its width over its heads.
    """

    model_type: str
    architecture: str
    stated: Mapping[str, tuple[str, Kind[Any]]] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"
    permuted: bool = False
    shifted: bool = False
    partial: bool = False
    scales: bool = False
    largest: int = 0


_GELU = {"hidden_act": "gelu_pytorch_tanh"}
_USED = {"num_experts_per_tok": (".expert_used_count", COUNT)}
_EXPERTS = {"num_experts": (".expert_count", COUNT), **_USED}
_NARROW_EXPERTS = {**_EXPERTS, "moe_intermediate_size": (".expert_feed_forward_length", COUNT)}
_LOGITS = {"logit_scale": (".logit_scale", NUMBER)}
_CAPS = {
    "attn_logit_softcapping": (".attn_logit_softcapping", NUMBER),
    "final_logit_softcapping": (".final_logit_softcapping", NUMBER),
}
_WINDOW = {"sliding_window": (".attention.sliding_window", COUNT)}
_MULTIPLIERS = {
    "attention_multiplier": (".attention.scale", NUMBER),
    "embedding_multiplier": (".embedding_scale", NUMBER),
    "residual_multiplier": (".residual_scale", NUMBER),
    "logits_scaling": (".logit_scale", NUMBER),
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": (".expert_shared_feed_forward_length", COUNT)}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_PARALLEL = {"use_parallel_residual": (".use_parallel_residual", FLAG)}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"num_local_experts": (".expert_count", COUNT), **_USED},
    permuted=True,
)
"""What a llama with experts is."""
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", permuted=True, scales=True),
    "command-r": Family("cohere", "CohereForCausalLM", _LOGITS, epsilon="layer_norm_eps"),
    "cohere2": Family(
        "cohere2",
        "Cohere2ForCausalLM",
        {**_LOGITS, **_WINDOW},
        {"sliding_window_pattern": 4},
        epsilon="layer_norm_eps",
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", {}, _GELU, shifted=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _CAPS, _GELU, shifted=True, largest=46),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WINDOW,
        {**_GELU, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
        shifted=True,
        scales=True,
        largest=62,
    ),
    "granite": Family("granite", "GraniteForCausalLM", _MULTIPLIERS, permuted=True, scales=True),
    "nemotron": Family(
        "nemotron",
        "NemotronForCausalLM",
        {},
        {"hidden_act": "relu2"},
        epsilon="norm_eps",
        shifted=True,
        partial=True,
    ),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", scales=True),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", _EXPERTS, {"norm_topk_prob": False}, scales=True),
    "phi2": Family(
        "phi",
        "PhiForCausalLM",
        {},
        {"hidden_act": "gelu_new"},
        epsilon="layer_norm_eps",
        partial=True,
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", partial=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", scales=True),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_NARROW_EXPERTS, **_SHARED_EXPERT},
        {**_SPARSE, "norm_topk_prob": False},
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", scales=True),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _NARROW_EXPERTS, _SPARSE),
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM", scales=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", permuted=True, scales=True),
    "stablelm": Family(
        "stablelm", "StableLmForCausalLM", _PARALLEL, epsilon="layer_norm_eps", partial=True
    ),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", {}, _GELU, epsilon="norm_epsilon"),
}
