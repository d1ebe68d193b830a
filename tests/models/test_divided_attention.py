"""Passes of a few rows off the CPU, divided into calls that Metal's vector kernel takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate, generate_many
from mlx_specdec.models import attention_parts
from mlx_specdec.models.attention_parts import in_parts
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.attention import ATTENTION_FUNCTION, attend, replace_in
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import PROMPT, pair_of, perturbed

SIZE = 64
"""A head size that the vector kernel takes."""


@pytest.fixture
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_parts, "on_cpu", lambda: False)


@pytest.fixture
def calls(off_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records the rows of each call, a list for each attention that is divided."""
    made: list[list[int]] = []

    def recorded(most: int, *arrays: Any) -> Any:
        parts = list(in_parts(most, *arrays))
        made.append([part[0].shape[2] for part in parts])
        return parts

    monkeypatch.setattr(attention_parts, "in_parts", recorded)
    return made


@pytest.fixture
def kernel_calls(off_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Records rows, query heads per key-value head, and keys of each call of MLX's attention."""
    made: list[tuple[int, ...]] = []
    plain = mx.fast.scaled_dot_product_attention

    def recorded(queries: mx.array, keys: mx.array, *rest: Any, **named: Any) -> mx.array:
        made.append((queries.shape[2], queries.shape[1] // keys.shape[1], keys.shape[2]))
        return plain(queries, keys, *rest, **named)

    monkeypatch.setattr(mx.fast, ATTENTION_FUNCTION, recorded)
    return made


def refuse_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("something is computed in a forward pass")

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, refused)


def arrays(heads: int, shared: int, rows: int, keys: int, size: int) -> tuple[mx.array, ...]:
    """Return queries, keys and values of two sequences."""
    shapes = ((2, heads, rows, size), (2, shared, keys, size), (2, shared, keys, size))
    return tuple(
        mx.random.normal(shape, key=mx.random.key(number)) for number, shape in enumerate(shapes)
    )


@pytest.mark.parametrize(
    ("group", "size"), [(1, 64), (2, 256), (5, 64), (7, 128), (8, 64), (32, 256)]
)
def test_every_call_of_a_short_pass_is_within_the_kernels_limits(
    group: int,
    size: int,
    kernel_calls: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_to_compute(monkeypatch)
    for rows in range(1, 33):
        for mask in (None, "causal" if rows > 1 else None, mx.zeros((2, 1, rows, rows + 6))):
            queries, *shown = arrays(2 * group, 2, rows, rows + 6, size)
            kernel_calls.clear()
            assert attend(queries, *shown, None, 0.1, mask).shape == queries.shape
            assert sum(call[0] for call in kernel_calls) == rows
            most = min(8, 32 // group)
            assert len(kernel_calls) == -(-rows // most), "no more calls than the kernel needs"
            for count, heads, keys in kernel_calls:
                assert heads == group and count <= min(most, keys)


def masks(rows: int, keys: int, heads: int) -> dict[str, Any]:
    causal = mx.arange(keys) <= mx.arange(keys - rows, keys)[:, None]
    windows = mx.stack([causal, causal & (mx.arange(keys) > 3)])[:, None]
    biases = mx.random.normal((1, heads, rows, keys), key=mx.random.key(9))
    return {
        "none": None,
        "causal": "causal",
        "bool": causal,
        "bool of each sequence": windows,
        "one row of each sequence": windows[:, :, -1:],
        "additive": mx.where(windows, biases, -1e9),
    }


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", masks(2, 3, 4))
def test_a_divided_attention_is_the_whole_one(
    name: str, with_sinks: bool, calls: list[list[int]]
) -> None:
    sinks = mx.arange(8.0) / 4 if with_sinks else None
    for rows in (5, 9, 32):
        mask = masks(rows, rows + 7, 8)[name]
        shown = arrays(8, 1, rows, rows + 7, SIZE)
        expected = base.scaled_dot_product_attention(*shown, None, 0.125, mask, sinks)
        calls.clear()
        divided = attend(*shown, None, 0.125, mask, sinks)
        assert calls == [[4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)]
        assert mx.allclose(divided, expected, rtol=1e-6, atol=1e-6)


def grouped(heads: int, shared: int, family: str = "llama", **changes: Any) -> DecoderOnlyModel:
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": SIZE,
        **changes,
    }
    model = DecoderOnlyModel(tiny.build(family, **sizes))
    replace_in(model.network)
    return model


FAMILIES: dict[str, Callable[[], DecoderOnlyModel]] = {
    "llama": lambda: grouped(8, 1),
    "gpt_oss": lambda: grouped(8, 1, "gpt_oss"),
    "a window": lambda: DecoderOnlyModel(
        tiny.build("llama", head_dim=SIZE, num_attention_heads=8, num_key_value_heads=1),
        caches=CacheSettings(max_size=16),
    ),
    "8 bits": lambda: DecoderOnlyModel(
        tiny.build("llama", head_dim=SIZE, num_attention_heads=8, num_key_value_heads=1),
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
        Request(prompt, Options(max_tokens=14, num_draft=count, temperature=heat, seed=3))
        for prompt, heat, count in ((PROMPT * 3, 0.0, 6), (PROMPT[:1], 1.0, 9), (PROMPT, 0.7, 6))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(attention_parts, "FEW", 1)
        plain = [
            generate(pair, request.prompt, replace(request.options, regular=True)).tokens
            for request in requests
        ]
        assert not calls
    alone = [generate(pair, request.prompt, request.options) for request in requests]
    assert [result.tokens for result in alone] == plain
    # Quantized caches have no such kernel.
    assert (max(map(len, calls), default=0) > 1) == (name != "8 bits")
    calls.clear()
    together = list(generate_many(pair, requests, requests[0].options, batch_size=3))
    assert [result.tokens for result in together] == plain
    assert all(result.stats.drafted for result in together)
    assert max(map(len, calls), default=0) > 1 or name == "8 bits"
    assert any(result.stats.drafted > result.stats.accepted > 0 for result in alone)
