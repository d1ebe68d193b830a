"""Tiny models whose config.json has the form of today's published ones, as transformers writes it:
drafts, batches, rewinds and chats give the text of plain decoding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from transformers import AutoConfig

from mlx_specdec import Options, PromptCache, Request, generate, load, stream_generate, stream_many

from ..support import tiny
from ..support.tokenizers import byte_level
from .support import moved

pytestmark = pytest.mark.slow
SIZE = 400
LENGTH = 10
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
SIZES: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LINEAR = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_MOE = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}
GEMMA = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": tiny.WINDOW,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
CONVS = ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": tiny.WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "Gemma 4 E2B": (
        "gemma4",
        {
            **GEMMA,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": SIZE,
            "num_kv_shared_layers": 3,
            "num_key_value_heads": 1,
            "use_double_wide_mlp": True,
        },
    ),
    "Gemma 4 12B": ("gemma4_unified", GEMMA),
    "Gemma 4 26B-A4B": (
        "gemma4",
        {**GEMMA, **EXPERTS, "enable_moe_block": True, "top_k_experts": 2},
    ),
    "Gemma 4 31B": (
        "gemma4",
        {**GEMMA, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "Qwen3-Next-80B-A3B": ("qwen3_next", QWEN_MOE),
    "Qwen3.8-27B": ("qwen3_5", LINEAR),
    "Qwen3.6-35B-A3B": ("qwen3_5_moe", QWEN_MOE),
    "LFM2.5-1.2B": (
        "lfm2",
        {
            "num_hidden_layers": 6,
            "layer_types": CONVS,
            "block_multiple_of": 8,
            "full_attn_idxs": None,
            "block_dim": 32,
        },
    ),
    "LFM2-8B-A1B": ("lfm2_moe", {**EXPERTS, "num_hidden_layers": 6, "layer_types": CONVS}),
    "Nemotron-Nano-9B-v2": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]},
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"]},
    ),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        {
            **LATENT,
            "qk_nope_head_dim": 8,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
        },
    ),
    "Muse-Glimmer-30B": (
        "muse_glimmer",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": tiny.WINDOW,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "Laguna-S": (
        "laguna",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": tiny.WINDOW,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_attention_heads_per_layer": [4, 4, 4, 4],
            "shared_expert_intermediate_size": 32,
        },
    ),
}
WRAPPED = ("gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe", "muse_glimmer")
"""Types with a `text_config`."""


def config_of(name: str) -> dict[str, Any]:
    """Return config.json as transformers writes it for a model of these sizes."""
    kind, changes = FAMILIES[name]
    sizes = {**SIZES, **changes}
    if kind not in WRAPPED:
        return json.loads(json.dumps(AutoConfig.for_model(kind, **sizes).to_dict()))
    whole = AutoConfig.for_model(kind, text_config=sizes).to_dict()
    return json.loads(json.dumps({**whole, "vocab_size": SIZE, "eos_token_id": 1}))


def written(name: str, directory: Path) -> Path:
    """Write a model with random weights."""
    directory.mkdir(parents=True)
    config = config_of(name)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # mlx-lm alone does not read each of these entries as transformers writes them.
    sizes = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5} | SIZES | FAMILIES[name][1]
    if "text_config" in config:
        sizes |= {"text_config": config["text_config"] | sizes}
    model, arguments = _get_classes(config)
    network = tiny.randomized(model(arguments.from_dict(config | sizes)))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return byte_level(directory, chat_template=TEMPLATE)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("published")
    target = written(request.param, base / "target")
    return load(target, moved(target, base / "draft"))


# Random texts are short of repetitions, and a penalty keeps tied heads from repeating one token.
SAMPLED = Options(max_tokens=LENGTH, temperature=0.8, seed=3, frequency_penalty=1.0)


GREEDY = replace(SAMPLED, temperature=0.0)
REQUESTS = (Request("one text", SAMPLED), Request("another, longer text of a user", GREEDY))


@pytest.fixture(scope="module")
def plain(pair: Any) -> list[tuple[int, ...]]:
    """The tokens of plain decoding for each of REQUESTS."""
    texts = [generate(pair, r.prompt, replace(r.options, regular=True)).tokens for r in REQUESTS]
    assert all(len(set(tokens)) > 3 for tokens in texts)
    return texts


def test_drafts_and_rewinds_change_no_text(pair: Any, plain: list[tuple[int, ...]]) -> None:
    for request, tokens, proposer in zip(REQUESTS, plain, ("draft", "ngram"), strict=True):
        drafting = replace(request.options, proposer=proposer, num_draft=3, ngram_min=1)
        result = generate(pair, request.prompt, drafting)
        assert result.tokens == tokens
        assert proposer == "ngram" or result.stats.drafted > result.stats.accepted


def test_a_batch_changes_no_text(pair: Any, plain: list[tuple[int, ...]]) -> None:
    """The third request, which joins later, is the first one again."""
    rows = [(0, LENGTH), (1, 4), (0, 7)]
    requests = [
        Request(
            REQUESTS[number].prompt,
            replace(REQUESTS[number].options, num_draft=3, proposer="draft", max_tokens=max_tokens),
        )
        for number, max_tokens in rows
    ]
    run = stream_many(pair, requests, requests[0].options, batch_size=2)
    texts = {step.number: step.result.tokens for step in run if step.result is not None}
    assert [texts[row] for row in range(3)] == [plain[number][:most] for number, most in rows]
    assert not run.why_not


def test_a_chat_goes_on_from_what_was_cached(pair: Any) -> None:
    cache, options = PromptCache(1 << 24), replace(SAMPLED, num_draft=3, proposer="draft")
    messages = [{"role": "user", "content": "A question with several words in it."}]
    for turn in range(2):
        plain = generate(pair, messages, replace(options, regular=True))
        result = stream_generate(pair, messages, options, cache=cache).result()
        assert result.tokens == plain.tokens
        assert (result.labels.cached_tokens > 0) is (turn > 0)
        messages.append({"role": "assistant", "content": "An answer."})
        messages.append({"role": "user", "content": "And then?"})
