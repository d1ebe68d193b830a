"""Block drafters with the config.json and the tensors of published ones, at tiny sizes. The entries
are those that vLLM, SGLang, mlx-vlm and mlx-dspark read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..support.speculators import HEAD_DIM, HEADS, INNER, KV_HEADS, RANK, VOCABULARY, WIDTH

LAYERS, TAPS, EPS = 2, 2, 1e-6
GROUP, TOP_K = 4, 6
SELECTOR = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}
HEADS_OF_DSPARK = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
PLACES = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
# Entries of the target's config.json, which the drafter does not use.
NOISE = {
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_value_heads": 48,
    "num_anchors": 128,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Case:
    """A published drafter.

    Attributes:
        first: The slot that drafts the first token.
        slots: Number of slots.
        plus: Number that is added to the weights of norms as they are stored.
        rotated: Number of entries of a head that are rotated.
        proportional: Whether a head's periods of rotation are those of a head that is rotated
            whole.
        window: Number of positions that a slot sees, itself included.
        renamed: The published name of each name that differs, or of its start.
    """

    config: dict[str, Any]
    first: int = 0
    slots: int = 7
    markov: bool = True
    gemma: bool = False
    gated: bool = False
    sinks: bool = False
    causal: bool = False
    interleaved: bool = False
    noise_level: bool = False
    second: bool = False
    plus: float = 0.0
    rotated: int = HEAD_DIM
    proportional: bool = False
    yarn: bool = False
    window: int = 10**6
    kv_heads: int = KV_HEADS
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (WIDTH, TAPS * WIDTH),
            "hidden_norm.weight": (WIDTH,),
            "norm.weight": (WIDTH,),
        }
        for at in (f"layers.{number}." for number in range(LAYERS)):
            shapes |= {f"{at}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
            names = ["input_layernorm", "post_attention_layernorm"]
            if self.gemma:
                names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
                shapes[f"{at}layer_scalar"] = (1,)
            else:
                shapes[f"{at}self_attn.v_proj.weight"] = (self.kv_heads * HEAD_DIM, WIDTH)
            shapes |= {f"{at}{name}.weight": (WIDTH,) for name in names}
            queries = HEADS * HEAD_DIM * (2 if self.gated else 1)
            shapes[f"{at}self_attn.q_proj.weight"] = (queries, WIDTH)
            shapes[f"{at}self_attn.k_proj.weight"] = (self.kv_heads * HEAD_DIM, WIDTH)
            shapes[f"{at}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
            shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, INNER)
            if self.second:
                for part in (f"{at}attention_conv", f"{at}mlp_conv"):
                    shapes[f"{part}.base_kernel"] = (2, 2, WIDTH)
                    shapes[f"{part}.kernel_projection.weight"] = (4 * WIDTH // GROUP, WIDTH)
            if self.sinks:
                shapes[f"{at}self_attn.attention_sink_bias"] = (HEADS,)
        if self.markov:
            shapes["markov_head.markov_w1.weight"] = (VOCABULARY, RANK)
            shapes["markov_head.markov_w2.weight"] = (VOCABULARY, RANK)
        if self.second:
            for part in ("predecessor", "successor"):
                shapes[f"candidate_selector.{part}_codebook"] = (VOCABULARY, RANK)
            shapes["candidate_selector.hidden_projection.weight"] = (RANK, WIDTH)
        if self.noise_level:
            shapes |= {"log_snr_embed.fc1.weight": (WIDTH, 128), "log_snr_embed.fc1.bias": (WIDTH,)}
            shapes |= {
                "log_snr_embed.fc2.weight": (WIDTH, WIDTH),
                "log_snr_embed.fc2.bias": (WIDTH,),
            }
        return shapes


NEMOTRON = {
    **SIZES,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "rope_theta": 10000,
    "layer_types": ["sliding_attention"] * LAYERS,
    "sliding_window": 6,
    "block_size": 8,
    "dspark_bonus_anchor": True,
    "dflash_query_causal": True,
    "attention_sink_bias": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "dflash_config": {
        **PLACES,
        "attention_sink_bias": True,
        "causal": True,
        "swa_window_size": 6,
        "use_swa": True,
        "sample_from_anchor": False,
    },
}
MAKORA = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"architectures": ["Gemma4ForConditionalGeneration"]},
    },
    "block_size": 7,
    "mask_token_id": 3,
    "draft_vocab_size": VOCABULARY,
    **HEADS_OF_DSPARK,
    "aux_hidden_state_layer_ids": [1, 2],
    "transformer_layer_config": {
        **SIZES,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
CASES: dict[str, Case] = {
    "deepseek-ai/dspark_qwen3_8b_block7": Case(
        {
            **SIZES,
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "block_size": 7,
            **PLACES,
            **HEADS_OF_DSPARK,
            "tie_word_embeddings": False,
        }
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": Case(
        {
            **SIZES,
            "architectures": ["Gemma4DSparkModel"],
            "model_type": "gemma4_text",
            "head_dim": 4,
            "global_head_dim": HEAD_DIM,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "layer_types": ["full_attention"] * LAYERS,
            "sliding_window": 1024,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "block_size": 7,
            "num_anchors": 512,
            **PLACES,
            **HEADS_OF_DSPARK,
        },
        gemma=True,
        kv_heads=1,
        rotated=4,
        proportional=True,
    ),
    "satgeze/Qwen3.6-27B-DSpark": Case(
        {
            **SIZES,
            **NOISE,
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3_5_text",
            "rope_parameters": PARTIAL,
            "block_size": 15,
            **PLACES,
            **HEADS_OF_DSPARK,
        },
        slots=15,
    ),
    "stanleyphoong/Ornith-1.0-9B-DSpark": Case(
        {
            **SIZES,
            "architectures": ["Qwen35DSparkModel"],
            "model_type": "qwen3_5",
            "enable_qwen35_gated_q_proj": True,
            "partial_rotary_factor": 0.25,
            "rope_parameters": PARTIAL,
            "confidence_temperatures": [1.5] * 7,
            "text_config": {"model_type": "qwen3_5_text"},
            "block_size": 7,
            **PLACES,
            **HEADS_OF_DSPARK,
        },
        gated=True,
        plus=1.0,
        rotated=2,
    ),
    "RadixArk/Qwen3.8-27B-DSpark": Case(
        {
            **SIZES,
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            "block_size": 7,
            "layer_types": ["full_attention"] * LAYERS,
            "rope_parameters": YARN,
            **HEADS_OF_DSPARK,
            "dflash_config": {"projector_type": "dspark", **PLACES, **HEADS_OF_DSPARK},
        },
        yarn=True,
    ),
    "LiquidAI/LFM2.5-2.6B-DSpark": Case(
        {
            **SIZES,
            "architectures": ["Lfm2DSparkDraftModel"],
            "model_type": "qwen3",
            "rope_theta": 10000.0,
            "rope_is_neox_style": False,
            "layer_types": ["full_attention"] * LAYERS,
            "block_size": 9,
            "dflash_config": {**PLACES, "num_target_layers": 30},
            **HEADS_OF_DSPARK,
        },
        slots=9,
        interleaved=True,
    ),
    "nvidia Nemotron-3.5-Lightning-30B-A3B DSpark": Case(
        NEMOTRON, first=1, slots=8, sinks=True, causal=True, window=6
    ),
    "makora-ai/gemma4-26b-a4b-dspark": Case(MAKORA, first=1),
    "Rahim/Ternary-Bonsai-27B-dspark": Case(
        {
            **SIZES,
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "rope_theta": 10000.0,
            "block_size": 7,
            "log_snr_conditioning": True,
            "min_log_snr": -9.0,
            "max_log_snr": 9.0,
            **PLACES,
            **HEADS_OF_DSPARK,
        },
        noise_level=True,
    ),
    "incoai/Qwen3.8-27B-DFlash2": Case(
        {
            **SIZES,
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "is_causal": False,
            "layer_types": ["sliding_attention"] * LAYERS,
            "sliding_window": 9,
            "rope_parameters": {"rope_theta": 10000.0},
            "dflash_config": {
                "block_size": 8,
                "conv_kernel_size": 2,
                "conv_group_size": GROUP,
                "selector_rank": RANK,
                "selector_top_k": TOP_K,
                **PLACES,
            },
        },
        first=1,
        slots=8,
        markov=False,
        second=True,
        window=9,
    ),
    "the assistant of Muse-Glimmer-30B": Case(
        {
            **{name: value for name, value in SIZES.items() if name != "vocab_size"},
            "vocab_size": VOCABULARY,
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "layer_types": ["sliding_attention"] * LAYERS,
            "sliding_window": 9,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "block_size": 8,
            **PLACES,
        },
        first=1,
        slots=8,
        markov=False,
        window=9,
        renamed={"fc.weight": "encoder.fc.weight", "hidden_norm": "encoder.output_norm_enc"},
    ),
}
