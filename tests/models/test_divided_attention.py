"""Passes of a few rows over a long cache, in calls that suit Metal's kernel for few rows: the same
texts, and only where a measurement says that it is faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from mlx_specdec.engine.generate import generate, generate_many
from mlx_specdec.engine.request import Request
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm import attention
from mlx_specdec.models.mlx_lm import model as mlx_lm_model
from mlx_specdec.models.mlx_lm.attention import NAME, attend, in_parts, replace_in
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options

from ..support import tiny
from ..support.pairs import PROMPT, pair_of, perturbed

ROUNDING = 1e-5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Divides what may be divided, and records the rows of each call, a list an attention."""
    made: list[list[int]] = []

    def recorded(*given: Any) -> Any:
        parts = list(in_parts(*given))
        made.append([each[0].shape[2] for each in parts])
        return parts

    monkeypatch.setattr(attention, "in_parts", recorded)
    monkeypatch.setattr(attention, "_pays", lambda *_: True)
    monkeypatch.setattr(attention, "LONG", 1)
    return made


def grouped(heads: int, shared: int, family: str = "llama", **own: Any) -> DecoderOnlyModel:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": shared, **own}
    model = DecoderOnlyModel(tiny.build(family, **sizes))
    replace_in(model.network)
    return model


@pytest.mark.parametrize(
    ("heads", "shared", "most"),
    [(4, 4, 8), (8, 2, 8), (10, 2, 6), (8, 1, 4), (16, 1, 2), (33, 1, 0)],
)
def test_rows_of_divided_passes_are_those_of_whole_ones(
    heads: int, shared: int, most: int, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grouped(heads, shared)
    tokens = mx.random.randint(0, 64, (1, 40 + 17), key=mx.random.key(2))

    def logits(rows: int) -> mx.array:
        caches = make_prompt_cache(model.network)
        model.run(tokens[:, :40], caches)
        calls.clear()
        return model.run(tokens[:, 40 : 40 + rows], caches).logits

    for rows in range(1, 18):
        divided = logits(rows)
        full, rest = divmod(rows, most) if most else (0, 0)
        expected = [most] * full + [rest] * (rest > 0) if rows > most > 0 else []
        assert calls == [expected] * 2 * bool(expected)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "LONG", 1000)
            whole = logits(rows)
            assert not calls
        assert mx.allclose(divided, whole, rtol=ROUNDING, atol=ROUNDING)


FAMILIES: dict[str, Callable[[], DecoderOnlyModel]] = {
    "llama": lambda: grouped(8, 1),
    "qwen3_moe": lambda: grouped(8, 2, "qwen3_moe"),
    "gemma3": lambda: grouped(8, 1, "gemma3"),
    "gpt_oss": lambda: grouped(8, 1, "gpt_oss"),
    "qwen3_next": lambda: grouped(8, 1, "qwen3_next"),
    "a window": lambda: DecoderOnlyModel(
        tiny.build("llama", num_attention_heads=8, num_key_value_heads=1),
        caches=CacheSettings(max_size=16),
    ),
    "8 bits": lambda: DecoderOnlyModel(
        tiny.build("llama", head_dim=32, num_attention_heads=8, num_key_value_heads=1),
        caches=CacheSettings(8, 32),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_whole_passes(
    name: str, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = FAMILIES[name](), FAMILIES[name]()
    replace_in(target.network)
    perturbed(draft.network, 0.3)
    pair = pair_of(target, draft)
    requests = [
        Request(prompt, Options(max_tokens=20, num_draft=count, temperature=heat, seed=3))
        for prompt, heat, count in ((PROMPT * 3, 0.0, 6), (PROMPT[:1], 1.0, 9), (PROMPT, 0.7, 6))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_pays", lambda *_: False)
        plain = [
            generate(pair, each.prompt, replace(each.options, regular=True)).tokens
            for each in requests
        ]
        assert not calls
    alone = [generate(pair, each.prompt, each.options) for each in requests]
    assert [each.tokens for each in alone] == plain
    # Quantized caches have no such kernel.
    assert (max(map(len, calls), default=0) > 1) == (name != "8 bits")
    calls.clear()
    together = list(generate_many(pair, requests, batch_size=3))
    assert [each.tokens for each in together] == plain
    assert max(map(len, calls), default=0) > 1 or name == "8 bits"
    assert any(each.stats.drafted > each.stats.accepted > 0 for each in alone)


@pytest.mark.parametrize(("seconds", "pays"), [((3.0, 1.0), True), ((1.0, 1.0), False)])
@pytest.mark.parametrize("mask", ["causal", None, "array"])
def test_a_shape_is_measured_once(
    seconds: tuple[float, float], pays: bool, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(attention, "on_cpu", lambda: False)
    monkeypatch.setattr(attention, "LONG", 16)
    monkeypatch.setattr(attention, "_measured", {})
    monkeypatch.setattr(attention.time, "perf_counter", lambda: passed[0])
    plain, counts = base.scaled_dot_product_attention, [0, 0]

    def timed(queries: mx.array, *given: Any) -> mx.array:
        whole = queries.shape[2] == 5
        counts[not whole] += 1
        passed[0] += seconds[0] if whole else seconds[1] / 2
        return plain(queries, *given)

    monkeypatch.setattr(base, NAME, timed)
    queries = mx.random.normal((1, 8, 5, 16), key=mx.random.key(0))
    mask = mx.arange(20) < 12 if mask == "array" else mask

    def called(keys: int, rows: int = 5) -> tuple[int, int]:
        before = list(counts)
        shown = mx.random.normal((1, 1, keys, 16), key=mx.random.key(keys))
        given = queries[:, :, :rows], shown, shown, None, 0.25
        part = mask[None, :keys] if isinstance(mask, mx.array) else mask
        result = attend(*given, part)
        assert mx.allclose(result, plain(*given, part), rtol=ROUNDING, atol=ROUNDING)
        return counts[0] - before[0], counts[1] - before[1]

    once, trial = ((0, 2) if pays else (1, 0)), (attention.TURNS + 1) * attention.CALLS
    assert called(20) == (trial + once[0], 2 * trial + once[1])
    assert called(19) == once and called(18) == once
    assert called(15) == (1, 0), "few keys"
    assert called(20, 4) == (0, 1), "rows that the kernel takes: other rows than five count so"
    assert len(attention._measured) == 1


def test_nothing_is_measured_or_put_in_place_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build("qwen2")
    module = sys.modules["mlx_lm.models.qwen2"]
    monkeypatch.setattr(module, NAME, base.scaled_dot_product_attention)
    DecoderOnlyModel(tiny.build("qwen2"))
    assert getattr(module, NAME) is base.scaled_dot_product_attention
    assert not attention._pays(*[lambda *_: mx.zeros(1)] * 2, mx.zeros((1, 1, 5, 8)))
    monkeypatch.setattr(mlx_lm_model, "on_cpu", lambda: False)
    DecoderOnlyModel(tiny.build("qwen2"))
    assert getattr(module, NAME) is attend
