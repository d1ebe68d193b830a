"""Write tests/fixtures/configurations: what transformers computes for tiny models of many types.

    python benchmarks/make_configurations.py [NAME ...]

A case is a configuration as transformers saves it today, with the names and shapes of the tensors
that it saves. Weights are not stored: `drawn` makes each one from its name. The reference is
float32 without a KV cache: greedy tokens after two prompts, a short and a long one, and their
log-probabilities. `neutral` is the same case with the tested key set to its neutral value: its
log-probabilities prove that the key changes the computation. This program needs torch."""

import copy
import json
import sys
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "configurations"
VOCABULARY, WINDOW, LENGTH = 96, 8, 6
PROMPTS = ([5, 9, 40, 41, 42, 7], [11 + (7 * i * i + 3 * i) % 80 for i in range(26)])
CONTEXT = 16
"""`original_max_position_embeddings` of scaled rotary positions: the prompts lie on both sides."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    "qk_rope_head_dim": 4,
    **dict.fromkeys(("index_topk", "index_n_heads"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv1d_width"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand", "expand"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "mamba_d_ssm": 64,
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    "hidden_size_per_layer_input": 8,
}
FULL, SLIDING = "full_attention", "sliding_attention"
NORMAL = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0], "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
LONG_OF_PHIMOE = {**LONG, "short_mscale": 1.1, "long_mscale": 1.3}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT, "rope_theta": 10000.0,
}  # fmt: skip


class Case(NamedTuple):
    """A configuration to compare.

    Attributes:
        type: `model_type`.
        changes: Entries of the configuration besides SMALL and OWN.
        neutral: The same with neutral values.
        prompts: How many of PROMPTS to compare.
        wide: Whether logits are eight times as large, which magnifies small differences."""

    type: str
    changes: Mapping[str, Any] = MappingProxyType({})
    neutral: dict[str, Any] | None = None
    prompts: int = len(PROMPTS)
    wide: bool = False


OWN: dict[str, dict[str, Any]] = {
    **{
        kind: {"layer_types": [SLIDING, FULL]}
        for kind in (
            *("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss"),
            *("olmo3", "mellum", "mimo_v2_flash", "laguna", "ministral"),
        )
    },
    "bailing_hybrid": {
        "num_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", FULL],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    **{
        kind: {"head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
        for kind in (
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
        )
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "head_dim": 8},
    "gemma3": {
        "text_config": {"layer_types": [SLIDING, FULL]},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "image_size": 28,
            "num_attention_heads": 2,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "minicpm3": {
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 4,
        "scale_emb": 1,
        "dim_model_base": 16,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "layer_types": [SLIDING, FULL] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "altup_num_inputs": 2,
        "laurel_rank": 4,
    },
    **{
        kind: {"sliding_window": None}
        for kind in ("mistral", "mixtral", "phi3", "ministral3", "starcoder2")
    },
    "gptj": {"rotary_dim": 4, "n_inner": 128},
    "gpt2": {"n_inner": 128},
    "gpt_neox": {"intermediate_size": 128},
    "longcat_flash": {
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 1,
        "moe_topk": 2,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", FULL]},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": 4,
    },
    "olmo_hybrid": {"linear_num_key_heads": 4, "layer_types": ["linear_attention", FULL]},
    "phimoe": {"sliding_window": None, "attention_bias": True, "lm_head_bias": True},
    **{
        kind: {"layer_types": ["linear_attention", FULL]}
        for kind in (*("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "minimax"),)
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
    "kimi_linear": {"layer_types": ["linear_attention", FULL]},
}
_NAMES = """
afmoe apertus bailing_hybrid bitnet cohere cohere2 dbrx deepseek_v2 deepseek_v3 deepseek_v32
dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba gemma gemma2 gemma3_text
gemma3n_text gemma4 gemma4_text gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense
internlm3 iquestcoder jamba laguna lfm2 lfm2_moe llama llama4 llama4_text mamba mamba2 mellum
mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron
nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3
solar_open stablelm starcoder2
"""
TYPES = _NAMES.split()
NONE: dict[str, Any] = {"rope_parameters": NORMAL}


def _layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


CASES: dict[str, Case] = {
    **{kind: Case(kind) for kind in TYPES},
    # Rotary positions.
    "llama-linear": Case(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        NONE,
    ),
    "llama-llama3": Case("llama", {"rope_parameters": LLAMA3}, NONE),
    **{
        f"{kind}-yarn": Case(kind, {"rope_parameters": YARN}, NONE)
        for kind in (*("llama", "qwen2", "qwen3", "seed_oss", "exaone4", "mistral", "smollm3"),)
    },
    **{
        f"{kind}-yarn-exact": Case(
            kind,
            {"rope_parameters": {**YARN, "truncate": False}, "head_dim": 32},
            {"rope_parameters": YARN},
        )
        for kind in ("llama", "gpt_oss", "qwen3_moe")
    },
    **{
        f"{kind}-yarn-attention": Case(
            kind, {"rope_parameters": {**YARN, "attention_factor": 1.6}}, {"rope_parameters": YARN}
        )
        for kind in ("llama", "qwen3", "gpt_oss")
    },
    "deepseek_v3-yarn": Case(
        "deepseek_v3",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_interleave": True,
        },
        {"rope_parameters": YARN},
    ),
    "deepseek_v3-halves": Case(
        "deepseek_v3", {"rope_interleave": False}, {"rope_interleave": True}
    ),
    **{
        f"{kind}-longrope": Case(
            kind,
            {
                "rope_parameters": LONG,
                "original_max_position_embeddings": CONTEXT,
            },
            NONE,
        )
        for kind in ("llama", "phi3", "minicpm3")
    },
    "phimoe-longrope": Case(
        "phimoe",
        {
            "rope_parameters": LONG_OF_PHIMOE,
            "original_max_position_embeddings": CONTEXT,
        },
        NONE,
        prompts=1,
    ),  # above CONTEXT transformers takes the short factors by mistake
    "phi3-partial": Case(
        "phi3", {"rope_parameters": {**NORMAL, "partial_rotary_factor": 0.5}}, NONE
    ),
    "glm-partial": Case(
        "glm",
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 1.0}},
    ),
    "nemotron-partial": Case(
        "nemotron",
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 1.0}},
    ),
    "stablelm-partial": Case(
        "stablelm",
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {**NORMAL, "partial_rotary_factor": 1.0}},
    ),
    "smollm3-nope": Case("smollm3", {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    # Windows. In the base case of these types it is set already.
    **{
        f"{kind}-window": Case(kind, {"sliding_window": WINDOW}, {"sliding_window": None})
        for kind in (*("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral3"),)
    },
    "gemma2-window": Case("gemma2", {"sliding_window": WINDOW}, {"sliding_window": 200}),
    **{
        f"{kind}-window": Case(
            kind,
            {"use_sliding_window": True, "sliding_window": WINDOW, **_layers(FULL, SLIDING)},
            _layers(FULL, FULL),
        )
        for kind in ("qwen2", "qwen3", "qwen2_moe")
    },
    "qwen3_moe-window": Case(
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": WINDOW},
        {"use_sliding_window": False},
    ),
    "gemma3_text-layers": Case(
        "gemma3_text", _layers(SLIDING, SLIDING, FULL), _layers(FULL, FULL, FULL)
    ),
    "exaone4-integer": Case(
        "exaone4", {"sliding_window_pattern": 2, **_layers(SLIDING, FULL)}, _layers(FULL, FULL)
    ),
    # Scalings and caps.
    "gemma2-caps": Case(
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2-no-caps": Case(
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    ),
    "gemma3_text-cap": Case(
        "gemma3_text", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": None}
    ),
    "cohere-scale": Case("cohere", {"logit_scale": 0.5}, {"logit_scale": 1.0}),
    "granite-scales": Case(
        "granite",
        {
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
        },
        {
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.35,
        },
    ),
    "falcon_h1-scales": Case(
        "falcon_h1",
        {
            "key_multiplier": 0.3,
            "attention_in_multiplier": 1.7,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.4,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.7,
            "mlp_multipliers": [0.8, 0.5],
        },
        {"key_multiplier": 1.0, "attention_in_multiplier": 1.0},
    ),
    "falcon_h1-norm": Case(
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False},
        {"mamba_norm_before_gate": True},
    ),
    "granitemoehybrid-groups": Case("granitemoehybrid", {"mamba_n_groups": 2}),
    "nemotron_h-steps": Case("nemotron_h", {"time_step_min": 0.5}, {"time_step_min": 0.001}),
    # Activations.
    "gemma-tanh": Case(
        "gemma",
        {"hidden_act": "gelu"},
        wide=True,  # which means the approximation here
    ),
    "starcoder2-tanh": Case(
        "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu"}, wide=True
    ),
    # Biases, norms, heads and routing.
    "llama-biases": Case(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": False, "mlp_bias": False},
    ),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    "qwen3-biases": Case("qwen3", {"attention_bias": True}, {"attention_bias": False}),
    "phi-norms": Case("phi", {"qk_layernorm": True}, {"qk_layernorm": False}),
    "stablelm-norms": Case("stablelm", {"qk_layernorm": True}, {"qk_layernorm": False}),
    "stablelm-parallel": Case(
        "stablelm", {"use_parallel_residual": True}, {"use_parallel_residual": False}
    ),
    "gpt_neox-serial": Case(
        "gpt_neox", {"use_parallel_residual": False}, {"use_parallel_residual": True}
    ),
    "olmoe-clip": Case("olmoe", {"clip_qkv": 0.5}, {"clip_qkv": None}),
    "olmoe-normalized": Case("olmoe", {"norm_topk_prob": True}, {"norm_topk_prob": False}),
    "qwen3_moe-normalized": Case("qwen3_moe", {"norm_topk_prob": True}, {"norm_topk_prob": False}),
    "qwen3_moe-dense": Case("qwen3_moe", {"mlp_only_layers": [0]}, {"mlp_only_layers": []}),
    "deepseek_v3-groups": Case(
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        {"n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
    "gemma3-resized": Case("gemma3"),
}


def drawn(name: str, shape: tuple[int, ...], wide: bool = False) -> np.ndarray:
    """Return the weight of a tensor, float32. The same name gives the same numbers."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    normal = np.asarray(random.standard_normal(shape), np.float32)
    if len(shape) > 1:
        width = np.prod(shape[1:]) if len(shape) < 3 else shape[-1]
        return normal * np.float32(1.5 / np.sqrt(width))
    scale = 8.0 if wide and name.startswith("model.norm.") else 1.0
    drawn = 0.3 * normal + ("norm" in name and "bias" not in name)
    return np.asarray(scale * drawn, np.float32)


def settings_of(kind: str, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a case as an object of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made, changes = CONFIG_MAPPING[kind], copy.deepcopy(dict(changes))  # it may change what it gets
    known = made().to_dict()
    entries = {name: value for name, value in SMALL.items() if name in known}
    entries |= OWN.get(kind, {})
    if isinstance(known.get("text_config"), dict):
        inner = {name: value for name, value in SMALL.items() if name in known["text_config"]}
        inner |= OWN.get(known["text_config"]["model_type"], {}) | entries.pop("text_config", {})
        return made(**{**entries, "text_config": {**inner, **changes}})
    return made(**{**entries, **changes})


def reference(case: Case, changes: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Write a model, give it drawn weights, and return what transformers computes."""
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = settings_of(case.type, changes)
    AutoModelForCausalLM.from_config(settings).float().save_pretrained(directory)
    file = directory / "model.safetensors"
    with safe_open(file, "np") as stored:
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    weights = {name: drawn(name, tuple(shape), case.wide) for name, shape in shapes.items()}
    save_file(weights, file, {"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    model.eval()
    outputs = []
    for prompt in PROMPTS[: case.prompts]:
        tokens, scores = list(prompt), []
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            log_p = logits.double().log_softmax(-1)
            tokens.append(int(log_p.argmax()))
            scores.append(round(float(log_p.max()), 5))
        outputs.append({"tokens": tokens[len(prompt) :], "logprobs": scores})
    config = json.loads((directory / "config.json").read_text())
    wide = {"wide": True} if case.wide else {}
    return {"config": config, "shapes": shapes, "outputs": outputs, **wide}


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    warnings.filterwarnings("ignore")
    OUTPUT.mkdir(exist_ok=True)
    for name, case in CASES.items():
        if names and name not in names:
            continue
        try:
            with tempfile.TemporaryDirectory() as directory:
                made = reference(case, case.changes, Path(directory))
            if case.neutral is not None:
                with tempfile.TemporaryDirectory() as directory:
                    changes = {**case.changes, **case.neutral}
                    made["neutral"] = reference(case, changes, Path(directory))["outputs"]
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            continue
        text = json.dumps(made, separators=(",", ":"))
        (OUTPUT / f"{name}.json").write_text(text + "\n")
        print(name, made["outputs"][-1]["tokens"], made["outputs"][-1]["logprobs"][:2])


if __name__ == "__main__":
    main(sys.argv[1:])
