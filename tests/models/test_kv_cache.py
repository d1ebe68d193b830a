"""The cache returns exactly what was appended, and forgets exactly what it is told to."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mlx_specdec.models.kv_cache import STEP, KVCache


def rows(count: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, 2, count, 4), key=mx.random.key(seed))


def test_what_was_appended_comes_back_across_growth() -> None:
    cache, whole = KVCache(), rows(3 * STEP)
    cuts = [0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP]
    for start, end in itertools.pairwise(cuts):
        keys, values = cache.append(whole[:, :, start:end], -whole[:, :, start:end])
        assert cache.length == end
        assert mx.array_equal(keys, whole[:, :, :end])
        assert mx.array_equal(values, -whole[:, :, :end])


@pytest.mark.parametrize("kept", [0, 1, STEP - 1, STEP, 2 * STEP])
def test_a_rewound_cache_equals_one_that_never_saw_the_rest(kept: int) -> None:
    cache, first, other = KVCache(), rows(2 * STEP), rows(5, seed=1)
    cache.append(first, -first)
    cache.rewind(kept)
    assert cache.length == kept
    keys, values = cache.append(other, -other)
    assert mx.array_equal(keys, mx.concatenate([first[:, :, :kept], other], axis=2))
    assert mx.array_equal(values, -keys)


def test_results_handed_out_before_a_rewind_keep_their_values() -> None:
    cache, first = KVCache(), rows(8)
    before, _ = cache.append(first, first)
    cache.rewind(2)
    cache.append(rows(6, seed=1), first[:, :, 2:])
    assert mx.array_equal(before, first)


@pytest.mark.parametrize("wrong", [-1, 9])
def test_a_cache_cannot_keep_more_than_it_holds(wrong: int) -> None:
    cache = KVCache()
    cache.append(rows(8), rows(8))
    with pytest.raises(ValueError, match="cannot keep"):
        cache.rewind(wrong)
    assert cache.length == 8


def test_buffers_have_the_type_of_what_comes_first() -> None:
    keys, values = KVCache().append(rows(3).astype(mx.bfloat16), rows(3).astype(mx.bfloat16))
    assert keys.dtype == values.dtype == mx.bfloat16
