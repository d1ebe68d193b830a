"""Every family in bfloat16, without the branches for CPUs, as a Mac computes it."""

import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.margins import find_parting, score
from mlx_specdec import Options, Request, Result, generate, generate_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import PROMPT, pair_of, perturbed
from ..support.simulated_metal import off_cpu

FIXTURES = Path(__file__).parents[1] / "fixtures"
ENCODER_DECODERS = [
    *(f"bart/{name}" for name in ("bart", "m2m100", "marian-two-vocabularies", "pegasus")),
    *(f"t5/{name}" for name in ("gated-silu", "mt5", "own-head-scaled", "umt5-tied")),
    *(f"t5gemma2/{name}" for name in ("grouped", "old")),
]
"""One of each kind of layer, embedding and head."""
FAMILIES = [*ENCODER_DECODERS, *tiny.CONFIGS]
QUICK = ("bart/bart", "t5/own-head-scaled", "t5gemma2/grouped", "llama", "gemma3", "mamba2", "lfm2")
EXPERTS = {"deepseek_v3", "gpt_oss", "llama4", "mixtral", "qwen3_moe", "qwen3_next"}
"""Families with experts, which MLX's CPU back end multiplies in float32 alone."""
RECURRENT = {"falcon_h1", "mamba2", "recurrent_gemma"}
"""Families whose passes over several tokens sum in another order than passes over one."""
TOKENS = 6
TIE = 0.1
"""Margin up to which rounding decides between two tokens: few steps of bfloat16 at logits of 4."""
ON_CPU = mx.default_device() == mx.Device(mx.cpu)
EXACT = ON_CPU and sys.platform == "linux"
"""Whether a product of several rows has the bits of single rows, as MLX's own loops for CPUs do."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    off_cpu(monkeypatch)


def model(family: str, moved: float) -> Base:
    """Return a new model of the family, whose weights are moved by a share of their size."""
    if family in ENCODER_DECODERS:
        made = load_model(FIXTURES / family, dtype="bfloat16").model
        if moved:
            perturbed(made.network, moved).set_dtype(mx.bfloat16)
        return made
    network = tiny.build(family)
    if moved:
        perturbed(network, moved)
    network.set_dtype(mx.bfloat16)
    return DecoderOnlyModel(network)


def plain(pair: Pair, request: Request, tokens: int) -> Result:
    """Return the first tokens of the completion of plain decoding."""
    return generate(pair, request.prompt, replace(request.options, regular=True, max_tokens=tokens))


def at_a_tie(pair: Pair, request: Request, found: Result, expected: Result) -> bool:
    """Return whether one of the tokens up to the first difference was a near tie."""
    part = find_parting(request.prompt, found.tokens, expected.tokens).position
    margins = score(pair, request.options, request.prompt, expected.tokens[: part + 1])
    return margins is not None and min(margins.values) < TIE


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_drafts_and_batches_change_no_text(family: str) -> None:
    if family in EXPERTS and ON_CPU:
        pytest.skip("MLX's CPU back end multiplies experts in float32 alone (GatherMM)")
    pair = pair_of(model(family, 0.0), model(family, 0.3))
    # Float32 in one place would make the rest of the pass float32.
    assert pair.target.open_batch([PROMPT]).advance(mx.array([[5]])).logits.dtype == mx.bfloat16
    settings = Options(max_tokens=TOKENS, num_draft=3, seed=1, cost_cache=False)
    requests = [
        Request(PROMPT, settings),
        Request(PROMPT[:3], replace(settings, temperature=0.8)),
    ]
    alone = generate(pair, requests[1].prompt, requests[1].options)
    first, second = generate_many(pair, requests, settings, batch_size=2)
    assert pair.target.rows_agree and alone.stats.drafted and first.stats.drafted
    for request, results in zip(requests, ([first], [second, alone]), strict=True):
        expected = plain(pair, request, TOKENS)
        for result in results:
            if result.tokens != expected.tokens:
                assert family in RECURRENT or not EXACT
                assert at_a_tie(pair, request, result, expected)
