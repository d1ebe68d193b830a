"""The cache returns exactly what was appended, and forgets exactly what it is told to."""

from __future__ import annotations

import itertools
import random

import mlx.core as mx
import pytest

from mlx_specdec.errors import RewindError
from mlx_specdec.models.kv_cache import BATCH_STEP, STEP, KVCache
from mlx_specdec.models.rows import Rows


def entries(count: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, 2, count, 4), key=mx.random.key(seed))


def opened(batch: int = 1) -> tuple[Rows, KVCache]:
    rows = Rows(batch)
    return rows, KVCache(rows)


def append(rows: Rows, cache: KVCache, new: mx.array, proposed: int = 0) -> mx.array:
    rows.advance(mx.zeros((new.shape[0], new.shape[2]), dtype=mx.int32), proposed)
    keys, values = cache.append(new, -new)
    assert mx.array_equal(values, -keys)
    return keys


def test_what_was_appended_comes_back_across_growth() -> None:
    (rows, cache), whole = opened(), entries(3 * STEP)
    cuts = [0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP]
    for start, end in itertools.pairwise(cuts):
        keys = append(rows, cache, whole[:, :, start:end])
        assert rows.lengths == (end,)
        assert mx.array_equal(keys, whole[:, :, :end])


@pytest.mark.parametrize("kept", [0, 1, STEP - 1, STEP, 2 * STEP])
def test_a_rewound_cache_equals_one_that_never_saw_the_rest(kept: int) -> None:
    (rows, cache), first, other = opened(), entries(2 * STEP), entries(5, seed=1)
    append(rows, cache, first, proposed=2 * STEP)
    rows.rewind((kept,))
    assert rows.lengths == (kept,)
    keys = append(rows, cache, other)
    assert mx.array_equal(keys, mx.concatenate([first[:, :, :kept], other], axis=2))


def test_results_handed_out_before_a_rewind_keep_their_values() -> None:
    (rows, cache), first = opened(), entries(8)
    before = append(rows, cache, first, proposed=8)
    rows.rewind((2,))
    append(rows, cache, entries(6, seed=1))
    assert mx.array_equal(before, first)


@pytest.mark.parametrize("lengths", [(-1,), (2,), (9,), (4, 4), ()])
def test_what_is_final_stays_and_what_was_not_seen_cannot(lengths: tuple[int, ...]) -> None:
    rows, cache = opened()
    append(rows, cache, entries(8), proposed=5)
    with pytest.raises(RewindError):
        rows.rewind(lengths)
    assert rows.lengths == (8,)


def test_buffers_have_the_type_of_what_comes_first() -> None:
    rows, cache = opened()
    assert append(rows, cache, entries(3).astype(mx.bfloat16)).dtype == mx.bfloat16


class Twins:
    """A cache of many sequences, and what each of them must hold."""

    def __init__(self, seed: int, batch: int) -> None:
        self.rows, self.cache = opened(batch)
        self.expected = [mx.zeros((1, 2, 0, 4)) for _ in range(batch)]
        self.seed = seed

    def append(self, count: int) -> None:
        self.seed += 1
        new = entries(count, self.seed, len(self.expected))
        keys = append(self.rows, self.cache, new, proposed=count)
        for row, held in enumerate(self.expected):
            self.expected[row] = mx.concatenate([held, new[row : row + 1]], axis=2)
            length = self.rows.lengths[row]
            assert mx.array_equal(keys[row : row + 1, :, :length], self.expected[row])

    def rewind(self, dice: random.Random, most: int) -> None:
        lengths = tuple(length - dice.randint(0, most) for length in self.rows.lengths)
        self.rows.rewind(lengths)
        self.expected = [
            held[:, :, :length] for held, length in zip(self.expected, lengths, strict=True)
        ]

    def join(self, other: Twins) -> None:
        self.rows.join(other.rows)
        self.cache.join(other.cache)
        self.expected += other.expected

    def filter(self, keep: list[int]) -> None:
        self.rows.filter(keep)
        self.cache.filter(keep)
        self.expected = [self.expected[row] for row in keep]


@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_keeps_its_own_whatever_joins_leaves_and_is_rewound(seed: int) -> None:
    dice = random.Random(seed)
    twins = Twins(seed, 3)
    for turn in range(40):
        count = dice.choice([1, 1, 2, 5, BATCH_STEP])
        twins.append(count)
        twins.rewind(dice, count)
        if turn % 7 == 3:
            other = Twins(1000 * turn, 2)
            if dice.random() < 0.7:
                other.append(dice.randint(1, 90))
            twins.join(other)
        if len(twins.expected) > 2 and turn % 5 == 4:
            twins.filter(sorted(dice.sample(range(len(twins.expected)), 2)))


def test_memory_of_sequences_that_left_is_given_back() -> None:
    twins = Twins(0, 8)
    twins.append(3 * BATCH_STEP)
    twins.rewind(random.Random(0), 3 * BATCH_STEP)
    held = sum(array.nbytes for array in twins.cache.state)
    short = min(range(8), key=lambda row: twins.rows.lengths[row])
    twins.filter([short, short])
    assert sum(array.nbytes for array in twins.cache.state) < held / 3
