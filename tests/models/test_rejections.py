"""A rejection takes no target pass in any family with recurrent state or windows, and leaves the
state of a sequence that was decoded token by token."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache

from mlx_specdec.models.mlx_lm import recurrence
from mlx_specdec.models.mlx_lm.context import DecoderOnlyContext
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.recurrence import Recurrences

from ..support import tiny
from ..support.families import config_of

RECURRENT = {
    "baichuan_m1": "Attention",
    "bailing_hybrid": "LinearAttention",
    "bailing_moe_linear": "LinearAttention",
    "bailing_moe_v3": "BailingKDA",
    "deepseek_v41": "Attention",
    "falcon_h1": "FalconH1Mixer",
    "gear": "ConvKVGatedMixer",
    "granitemoehybrid": "GraniteMoeHybridMamba2Mixer",
    "jamba": "JambaMambaMixer",
    "kimi_k3": "KimiK3DeltaAttention",
    "kimi_linear": "KimiDeltaAttention",
    "lfm2": "ShortConv",
    "lfm2-vl": "ShortConv",
    "lfm2_moe": "ShortConv",
    "llama4": "Attention",
    "longcat_flash_ngram": "NgramEmbedding",
    "mamba": "MambaBlock",
    "mamba2": "Mamba2Block",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "GatedDeltaNet",
    "plamo2": "Mamba",
    "qwen3_5": "GatedDeltaNet",
    "qwen3_5_moe": "GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentBlock",
    "rwkv7": "Rwkv7ChannelMixing Rwkv7TimeMixing",
}
"""The families of mlx-lm whose caches cannot drop entries, and the modules that are repeated."""
QUICK = ("qwen3_next", "mamba2", "lfm2", "rwkv7", "baichuan_m1")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
PROMPT, DRAFTED = 21, 4
"""The prompt is longer than the windows."""
TOKENS = random.Random(3).choices(range(tiny.VOCABULARY), k=PROMPT + 1 + DRAFTED + 1)


@functools.cache
def model_of(name: str, dtype: mx.Dtype = mx.float32) -> DecoderOnlyModel:
    network = tiny.from_config(config_of(name))
    network.set_dtype(dtype)
    return DecoderOnlyModel(network)


def fed(start: int, end: int) -> mx.array:
    return mx.array([TOKENS[start:end]])


def opened(model: DecoderOnlyModel) -> DecoderOnlyContext:
    context = model.open([0])
    assert isinstance(context, DecoderOnlyContext)
    context.advance(fed(0, PROMPT))
    return context


def states(context: DecoderOnlyContext) -> Iterator[np.ndarray]:
    for cache in context.states.caches:
        chunked = isinstance(cache, ChunkedKVCache)  # it drops old entries in the next pass
        for _, array in tree_flatten(cache.keys_and_values() if chunked else cache.state):
            if isinstance(array, mx.array):
                shown = array[:, :, -tiny.WINDOW :] if chunked else array
                yield np.array(shown.astype(mx.float32))


@pytest.mark.parametrize("name", ALL)
def test_the_state_after_any_rejection_is_that_of_decoding_token_by_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    context = opened(model)
    assert context.states and context.states.restored
    passes = itertools.count()
    run = model.run
    monkeypatch.setattr(model, "run", lambda *args: (next(passes), run(*args))[1])
    for kept in range(DRAFTED + 1):
        context, plain = opened(model), opened(model)
        for at in range(PROMPT, PROMPT + 1 + kept):
            plain.advance(fed(at, at + 1))
        before = next(passes)
        context.advance(fed(PROMPT, PROMPT + 1 + DRAFTED), proposed=DRAFTED)
        context.rewind((PROMPT + 1 + kept,))
        assert next(passes) - before == 2, "one pass a round, and the count itself"
        for actual, expected in zip(states(context), states(plain), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)
        following = fed(PROMPT + 1 + kept, PROMPT + 2 + kept)
        actual, expected = (np.array(c.advance(following).logits) for c in (context, plain))
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_only_the_modules_that_write_recurrent_state_are_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = opened(model_of(name))
    repeated = set()
    repeat = Recurrences.repeat

    def watched(self: Recurrences, calls: list[recurrence.RecordedCall], *args: Any) -> None:
        repeated.update(type(call.module).__name__ for call in calls)
        repeat(self, calls, *args)

    monkeypatch.setattr(Recurrences, "repeat", watched)
    context.advance(fed(PROMPT, PROMPT + 3), proposed=2)
    context.rewind((PROMPT + 1,))
    assert " ".join(sorted(repeated)) == RECURRENT[name]
