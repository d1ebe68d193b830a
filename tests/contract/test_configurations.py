"""Every decoder-only type computes what its config.json says: greedy tokens and log-probabilities
are those of transformers, which `benchmarks/make_configurations.py` has recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import (
    CheckpointError,
    Options,
    PromptCache,
    PromptError,
    Request,
    generate,
    generate_many,
    load,
    stream_generate,
)

from .configurations import CASES, LENGTH, compare, largest_difference, prompts_of, written
from .support import quick

CLOSE = 2.5e-4
"""Largest difference of a log-probability. MLX's and torch's sums differ by about 1e-5."""
REFUSED = {
    "bailing_hybrid": "lacks 'num_experts_per_tok'",
    "bitnet": "weight_scale is missing",
    "minimax": "lacks 'shared_intermediate_size'",
    "olmo": "ai2-olmo",
    "olmoe-clip": "sets clip_qkv to 0.5",
    "phi-norms": "sets qk_layernorm to True",
    "qwen3-biases": "sets attention_bias to True",
}
"""Case -> what the error names, for configurations that mlx-lm cannot compute."""
NAMES = sorted(file.stem for file in CASES.glob("*.json"))
MENDED = ("ernie4_5_moe", "falcon_h1-scales", "gemma2-window", "jamba", "mistral-window")
MENDED += ("phi3-longrope", "phi3-window", "starcoder2-window")
PUBLISHED = (
    "gemma3n_text",
    "gemma4",
    "gemma4_unified",
    "glm4_moe_lite",
    "gpt_oss",
    "laguna",
    "lfm2_moe",
)
PUBLISHED += ("nemotron_h", "qwen3_5_moe", "qwen3_next")
"""Types of today's most used models."""
OTHERS = ("cohere2", "deepseek_v3", "gpt2", "llama", "mamba2", "olmo2", "phi", "qwen3", "stablelm")


def case_of(name: str) -> dict[str, Any]:
    return json.loads((CASES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", quick(sorted({*NAMES} - {*REFUSED}), *MENDED, *PUBLISHED, *OTHERS))
def test_a_type_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    pair = load(written(case, tmp_path))
    for prompt, expected in prompts_of(case):
        assert compare(pair, prompt, expected) < CLOSE


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_mlx_lm_cannot_compute_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load(written(case_of(name), tmp_path))
    assert REFUSED[name] in str(refused.value) and "\n" not in str(refused.value)
    assert "download" not in str(refused.value)


def test_each_tested_key_changes_the_computation() -> None:
    proven = [name for name in NAMES if "neutral" in case_of(name)]
    weak = [name for name in proven if largest_difference(case_of(name)) < 4 * CLOSE]
    assert weak == [] and len(proven) > 50


@pytest.mark.parametrize("name", [*MENDED, *PUBLISHED])
def test_drafts_and_batches_change_nothing(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    directory = written(case, tmp_path)
    pair = load(directory, directory)
    options = Options(max_tokens=LENGTH, num_draft=3, proposer="draft", cost_cache=False)
    prompts, expected = zip(*prompts_of(case), strict=True)
    requests = [Request(prompt, options, ignore_eos=True) for prompt in prompts]
    results = generate_many(pair, requests)
    assert [list(result.tokens) for result in results] == [out["tokens"] for out in expected]
    assert all(result.stats.accepted > 0 for result in results)


def test_short_and_long_sequences_share_no_cached_prefix(tmp_path: Path) -> None:
    pair = load(written(case_of("phi3-longrope"), tmp_path))
    prompt, cache = [5, 9, 40, 41, 42, 7, 8, 9], PromptCache(1 << 20)
    alone = {limit: list(tokens_of(pair, prompt, limit)) for limit in (4, 40)}
    for limit in (4, 40, 4, 40):
        assert tokens_of(pair, prompt, limit, cache=cache) == alone[limit]
    assert alone[4] != alone[40][:4]


def tokens_of(pair: Any, prompt: list[int], limit: int, **settings: Any) -> list[int]:
    run = stream_generate(pair, prompt, Options(max_tokens=limit, cost_cache=False), **settings)
    return [token for emission in run for token in emission.tokens]


def test_a_window_that_mlx_lm_does_not_apply_bounds_the_sequence(tmp_path: Path) -> None:
    case = case_of("dots1")
    case["config"] |= {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    with pytest.warns(RuntimeWarning, match="wants a window of 8 tokens, which mlx-lm does not"):
        pair = load(written(case, tmp_path))
    with pytest.raises(PromptError, match="the model takes 8"):
        generate(pair, [5] * 9, Options(max_tokens=1))
    assert len(generate(pair, [5] * 6, Options(max_tokens=9, cost_cache=False)).tokens) == 2
