"""Block drafters with the config.json and the tensors of published ones, at tiny sizes, against a
plain version in NumPy. The entries are those that vLLM, SGLang, mlx-vlm and mlx-dspark read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.engine.generate import generate
from mlx_specdec.models.drafters.kinds import on_target, read
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.options import Options

from ..support import speculators
from ..support.drafter_pairs import pair_of
from ..support.lender import Lender, Run
from ..support.pairs import PROMPT, model_for
from ..support.speculators import HEAD_DIM, HEADS, INNER, KV_HEADS, RANK, VOCABULARY, WIDTH
from .dflash_by_hand import Array, norm, softmax

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


def turned(heads: Array, positions: Array, case: Case) -> Array:
    """Rotate (heads, rows, dim)."""
    rotated, width = case.rotated, HEAD_DIM
    pairs = rotated // 2
    count = width // 2 if case.proportional else pairs
    speeds = 10000.0 ** (-np.arange(pairs) / count)
    if case.yarn:
        ends = [
            pairs * math.log(16 / (turns * 2 * math.pi)) / math.log(10000.0) for turns in (4.0, 1.0)
        ]
        low, high = max(math.floor(ends[0]), 0), math.ceil(ends[1])
        slowed = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
        speeds = speeds * (1 - slowed) + speeds / 4.0 * slowed
        heads = heads * (0.1 * math.log(4.0) + 1)
    angles = positions[:, None] * speeds
    cos, sin = np.cos(angles), np.sin(angles)
    result = heads.copy()
    if case.interleaved:
        first, second = np.s_[..., 0:rotated:2], np.s_[..., 1:rotated:2]
    else:
        # Proportional rotation pairs an entry with the one half a head further.
        half = width // 2 if case.proportional else pairs
        first, second = np.s_[..., :pairs], np.s_[..., half : half + pairs]
    result[first] = heads[first] * cos - heads[second] * sin
    result[second] = heads[second] * cos + heads[first] * sin
    return result


def attention(layer: Mapping[str, Array], case: Case, context: Array, normed: Array) -> Array:
    rows, slots = len(context), len(normed)
    both = np.concatenate([context, normed])
    places = np.arange(rows + slots)

    def heads(name: str, states: Array) -> Array:
        flat = states @ layer[f"self_attn.{name}_proj.weight"].T
        return flat.reshape(len(states), -1, HEAD_DIM * (2 if name == "q" and case.gated else 1))

    queries, keys = heads("q", normed), heads("k", both)
    gate = None
    if case.gated:
        queries, gate = queries[..., :HEAD_DIM], queries[..., HEAD_DIM:]
    values = keys if case.gemma else heads("v", both)
    if case.gemma:
        values = norm(values, np.ones(HEAD_DIM), EPS)
    queries, keys = (
        norm(part, case.plus + layer[f"self_attn.{name}_norm.weight"], EPS).swapaxes(0, 1)
        for name, part in (("q", queries), ("k", keys))
    )
    queries = turned(queries, places[rows:], case)
    keys, values = turned(keys, places, case), values.swapaxes(0, 1)
    keys, values = (np.repeat(part, HEADS // case.kv_heads, axis=0) for part in (keys, values))
    scores = queries @ keys.swapaxes(1, 2) * (1.0 if case.gemma else HEAD_DIM**-0.5)
    behind = places[rows:, None] - places
    visible = behind < case.window
    if case.causal:
        visible &= behind >= 0
    scores = np.where(visible, scores, -np.inf)
    if case.sinks:
        sinks = layer["self_attn.attention_sink_bias"][:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(sinks, (HEADS, slots, 1))], axis=-1)
        values = np.concatenate([values, np.zeros((HEADS, 1, HEAD_DIM))], axis=1)
    mixed = (softmax(scores) @ values).swapaxes(0, 1)
    if gate is not None:
        mixed = mixed / (1 + np.exp(-gate))
    return mixed.reshape(slots, -1) @ layer["self_attn.o_proj.weight"].T


def feed_forward(layer: Mapping[str, Array], case: Case, rows: Array) -> Array:
    gate, up = (rows @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    if case.gemma:
        inner = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        inner = gate / (1 + np.exp(-gate))
    return (inner * up) @ layer["mlp.down_proj.weight"].T


def convolved(
    layer: Mapping[str, Array], part: str, side: int, source: Array, rows: Array
) -> Array:
    """Add to each row the row before it, with factors that a DFlash 2 computes from `source`.
    side: 0 before the part of the layer, 1 after it."""
    factors = source @ layer[f"{part}_conv.kernel_projection.weight"].T
    factors = factors.reshape(len(rows), 2, 2, -1)[:, side].repeat(GROUP, axis=-1)
    factors = factors + layer[f"{part}_conv.base_kernel"][side]
    before = np.concatenate([np.zeros((1, WIDTH)), rows[:-1]])
    return factors[:, 0] * rows + factors[:, 1] * before


def expected(
    tensors: Mapping[str, Array], case: Case, hidden: Array, embedding: Array, token: int
) -> tuple[list[int], Array]:
    """Return the draft of a block after `token`, whose hidden state is not known, and its
    logits."""
    states = embedding[[token, *[3] * (case.slots - 1)]]
    if case.noise_level:
        times = np.where(np.arange(case.slots) == 0, 1000.0, 0.0)[:, None]
        angles = times * 10000.0 ** (-np.arange(64) / 64)
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
        first = waves @ tensors["log_snr_embed.fc1.weight"].T + tensors["log_snr_embed.fc1.bias"]
        first = first / (1 + np.exp(-first))
        states = states + first @ tensors["log_snr_embed.fc2.weight"].T
        states = states + tensors["log_snr_embed.fc2.bias"]
    normed = {name: case.plus + array for name, array in tensors.items() if "norm" in name}
    context = norm(hidden @ tensors["fc.weight"].T, normed["hidden_norm.weight"], EPS)
    for at in (f"layers.{number}." for number in range(LAYERS)):
        layer = {n.removeprefix(at): array for n, array in tensors.items() if n.startswith(at)}
        inputs = norm(states, normed[f"{at}input_layernorm.weight"], EPS)
        if case.second:
            attended = attention(
                layer, case, context, convolved(layer, "attention", 0, inputs, inputs)
            )
            states = states + convolved(layer, "attention", 1, inputs, attended)
            inputs = norm(states, normed[f"{at}post_attention_layernorm.weight"], EPS)
            inner = feed_forward(layer, case, convolved(layer, "mlp", 0, inputs, inputs))
            states = states + convolved(layer, "mlp", 1, inputs, inner)
            continue
        attended = attention(layer, case, context, inputs)
        if case.gemma:
            attended = norm(attended, layer["post_attention_layernorm.weight"], EPS)
            states = states + attended
            inner = norm(states, layer["pre_feedforward_layernorm.weight"], EPS)
            inner = feed_forward(layer, case, inner)
            inner = norm(inner, layer["post_feedforward_layernorm.weight"], EPS)
            states = (states + inner) * layer["layer_scalar"]
        else:
            states = states + attended
            inner = norm(states, normed[f"{at}post_attention_layernorm.weight"], EPS)
            states = states + feed_forward(layer, case, inner)
    states = norm(states, normed["norm.weight"], EPS)
    drafted, rows, before = [], [], token
    for slot in range(case.first, case.slots):
        row = embedding @ states[slot]
        if case.markov:
            w1, w2 = (tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
            row = row + w2 @ w1[before]
        if case.second:
            selector = {name: tensors[f"candidate_selector.{name}"] for name in SELECTOR}
            gate = selector["hidden_projection.weight"] @ states[slot]
            likely = np.isin(np.arange(VOCABULARY), np.argsort(row)[-TOP_K:])
            row = row + selector["successor_codebook"] @ (
                selector["predecessor_codebook"][before] * gate
            )
            row = np.where(likely, row, -np.inf)
        rows.append(row)
        before = int(row.argmax())
        drafted.append(before)
    return drafted, np.stack(rows)


def written(case: Case, directory: Path) -> dict[str, Array]:
    """Write a drafter. Return its tensors in float64, by the names of DSpark's files."""
    tensors = speculators.random(case.shapes)
    stored = {}
    for name, array in tensors.items():
        if case.plus and "norm" in name:
            tensors[name] = array = array - case.plus
        for start, published in case.renamed.items():
            name = name.replace(start, published) if name.startswith(start) else name
        stored[name] = array
    speculators.write(directory, case.config, stored)
    return {name: np.array(array).astype(np.float64) for name, array in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_drafts_of_published_block_drafters(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tensors = written(case, tmp_path)
    keys = mx.random.split(mx.random.key(3), 3)
    embedding = mx.random.normal((VOCABULARY, WIDTH), key=keys[0])
    hidden = mx.random.normal((20, TAPS * WIDTH), key=keys[1])
    tokens: Any = mx.random.randint(0, VOCABULARY, (20,), key=keys[2]).tolist()
    files = read(tmp_path)
    assert files is not None
    lender = Lender(embedding)
    network = on_target(files, lender)
    network.load(files, NumberFormat("float32"))
    assert network.kind == ("dspark" if case.markov else "dflash2" if case.second else "dflash")
    assert network.most == case.slots - case.first
    run = Run(network, tokens, hidden)
    states = np.array(hidden).astype(np.float64), np.array(embedding).astype(np.float64)
    for length in (4, 5, 9, 12):
        drafted, rows = expected(
            tensors, case, states[0][: length - 1], states[1], tokens[length - 1]
        )
        actual, logits = run.draft(length, network.most)
        np.testing.assert_allclose(np.array(logits), rows, atol=2e-3, rtol=1e-3)
        assert actual == drafted


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_plain_decoding(name: str, tmp_path: Path) -> None:
    written(CASES[name], tmp_path / "drafter")
    pair = pair_of(model_for("qwen3_next"), tmp_path / "drafter")
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    plain = generate(pair, PROMPT, Options(**options, regular=True))
    result = generate(pair, PROMPT, Options(**options, num_draft=5))
    assert result.tokens == plain.tokens and result.stats.drafted > result.stats.accepted
