"""Quantised caches and windows of a given size: what they are, and who refuses them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.errors import OptionError
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.rows import BATCH_STEP, KVCache, Rows

from ..support import tiny


@pytest.mark.parametrize("family", ["gemma3", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("settings", [CacheSettings(8, 32), CacheSettings(max_size=16)])
def test_models_with_caches_of_their_own_refuse_both(family: str, settings: CacheSettings) -> None:
    with pytest.raises(OptionError, match="caches of their own"):
        DecoderOnlyModel(tiny.build(family), caches=settings)


# The cache returns exactly what was appended, and forgets exactly what it is told to.


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

    def merge(self, other: Twins) -> None:
        self.rows.merge(other.rows)
        self.cache.merge(other.cache)
        self.expected += other.expected

    def keep(self, keep: list[int]) -> None:
        self.rows.keep(keep)
        self.cache.keep(keep)
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
            twins.merge(other)
        if len(twins.expected) > 2 and turn % 5 == 4:
            twins.keep(sorted(dice.sample(range(len(twins.expected)), 2)))


# How long a sequence may be: what config.json says, scaled; a window knows no end.


WINDOW = CacheSettings(max_size=8)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 24),
        ({"rope_type": "linear", "factor": 4.0}, 96),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_scaled_positions_reach_further(
    tmp_path: Path, scaling: dict[str, Any] | None, longest: int
) -> None:
    changes = {"rope_scaling": scaling, "max_position_embeddings": 24}
    directory = tiny.write("llama", tmp_path, **changes)
    assert load_model(directory).model.max_length == longest
    assert load_model(directory, caches=WINDOW).model.max_length is None
