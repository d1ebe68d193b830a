"""The largest entries of a wide row are the ones that MLX's own top-k finds."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.largest import LEAST_ENTRIES, indices_of_largest, largest

WIDE = 20_011
"""Entries of a row that is searched in two stages. It is a prime, so that no width divides it."""


def same(one: mx.array, another: mx.array) -> bool:
    return one.dtype == another.dtype and mx.array_equal(one, another, equal_nan=True).item()


@st.composite
def rows(draw: st.DrawFn) -> mx.array:
    """Rows of logits, some of them wide, with ties, banned tokens and numbers that are not."""
    shape = draw(st.sampled_from([(1,), (5,), (1, 1), (2, 3), ()]))
    near = LEAST_ENTRIES + draw(st.integers(-3, 300))
    size = draw(st.sampled_from([2, 50, near, near // 5, WIDE]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    logits = draw(st.sampled_from([0.01, 1.0, 8.0])) * random.normal(size=(*shape, size))
    if draw(st.booleans()):
        logits = np.round(logits)
    banned = draw(st.sampled_from([0.0, 0.5, 0.9999]))
    logits[random.random(logits.shape) < banned] = -np.inf
    if draw(st.integers(0, 3)) == 0:
        logits[..., random.integers(0, size, draw(st.sampled_from([1, size])))] = np.nan
    dtype = draw(st.sampled_from([mx.float32, mx.bfloat16, mx.float16]))
    return mx.array(logits.astype(np.float32)).astype(dtype)


counts = st.sampled_from([1, 2, 20, 64, 1000])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows(), counts)
def test_the_largest_are_those_of_mlxs_top_k(logits: mx.array, k: int) -> None:
    k = min(k, logits.shape[-1])
    expected = mx.sort(mx.topk(logits, k, axis=-1), axis=-1)
    assert same(mx.sort(largest(logits, k), axis=-1), expected)
    indices = indices_of_largest(logits, k)
    assert indices.dtype == mx.uint32
    assert same(mx.sort(mx.take_along_axis(logits, indices, axis=-1), axis=-1), expected)
    ordered = mx.sort(indices, axis=-1)
    assert mx.all(ordered[..., 1:] > ordered[..., :-1]).item(), "no entry comes twice"
