"""Passes of a few rows through latent attention: single rows' arithmetic, and the same texts."""

import warnings
from typing import Any

import mlx.nn as nn
import pytest

from mlx_specdec import system
from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm import attention, trials
from mlx_specdec.models.mlx_lm.attention import absorbed_calls, expanding
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.families import config_of
from ..support.pairs import PROMPT, drafts_change_no_text, model_of, pair_of, perturbed

EXACT = (
    *("deepseek_v3", "kimi_vl", "kimi_k25", "glm4_moe_lite", "longcat_flash", "kimi_linear"),
    *("longcat_flash_ngram", "kimi_k3", "bailing_moe_v3", "mistral4"),
)
"""Families whose rows then are single rows: to the last bit, where BLAS sums all rows alike."""
ROUNDED = ("bailing_hybrid", "deepseek_v32", "glm_moe_dsa")
"""Families whose other parts differ by roundings."""
MATRICES = ("embed_q", "unembed_out")
ROUNDING = 4e-6
"""In float32, of sums in another order."""
WIDE = dict.fromkeys(
    ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim", "q_lora_rank"), 32
)
"""Sizes that are whole groups when they are quantized."""


def rows_apart(model: DecoderOnlyModel, seed: int = 0) -> float:
    return trials._rows_apart(model, model.untried, seed)[0]


def quantized(name: str) -> DecoderOnlyModel:
    network = tiny.from_config({**config_of(name), **WIDE})
    nn.quantize(network, 32, 8, class_predicate=lambda path, _: path.endswith(MATRICES))
    return DecoderOnlyModel(network)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_rows_of_every_family_with_a_latent_are_what_single_rows_are(name: str) -> None:
    model = model_of(name)
    before = absorbed_calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.open_batch([[1]])
    assert absorbed_calls() > before
    limit = 0.0 if name in EXACT and system.blas_name() == "bundled" else ROUNDING
    assert max(rows_apart(model, seed) for seed in range(3)) <= limit
    attention.release(expanding(model.network))
    assert rows_apart(model) > 0, "mlx-lm's rows have become single rows: nothing to do here"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_quantized_weights_are_absorbed_too(name: str) -> None:
    model = quantized(name)
    assert trials.absorb(model, model.untried) and rows_apart(model) <= ROUNDING


def windowed(name: str) -> DecoderOnlyModel:
    network = tiny.from_config(config_of(name))
    return DecoderOnlyModel(network, caches=CacheSettings(max_size=16))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        *((name, quantized) for name in ("deepseek_v3", "glm4_moe_lite", "mistral4")),
        *((name, windowed) for name in ("deepseek_v3", "mistral4")),
    ],
)
def test_texts_with_drafts_are_those_without(name: str, made: Any) -> None:
    target = made(name)
    draft = DecoderOnlyModel(perturbed(tiny.from_config(config_of(name)), 0.3))
    pair = pair_of(target, draft)
    requests = [
        Request(prompt, Options(max_tokens=24, num_draft=3, temperature=heat, seed=3))
        for prompt, heat in ((PROMPT, 0.0), (PROMPT[:1], 1.0), ([*PROMPT, *PROMPT[2:]], 0.7))
    ]
    before = absorbed_calls()
    drafts_change_no_text(pair, requests)
    assert absorbed_calls() > before
