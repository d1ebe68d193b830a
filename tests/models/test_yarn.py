"""Scaled positions of drafters, as transformers turns them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import YarnRoPE

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.kinds import read
from mlx_specdec.models.drafters.layers import rope_of

from ..support.speculators import HEAD_DIM, eagle3

PAIRS, THETA, FACTOR, LEARNED = HEAD_DIM // 2, 500.0, 8.0, 64
TOLD = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": LEARNED}
GROWN = 0.1 * math.log(FACTOR) + 1


def turned(directory: Path, told: dict[str, Any], **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """How far one position turns each pair, in radians, and how much it grows."""
    asked = {"rope_theta": THETA, "max_position_embeddings": 512, "rope_scaling": told, **changes}
    files = read(eagle3(directory, **asked))
    assert files is not None
    ones = mx.concatenate([mx.ones(PAIRS), mx.zeros(PAIRS)]).reshape(1, 1, 1, -1)
    first, second = np.split(np.array(rope_of(files.sizes)(ones, offset=1)).ravel(), 2)
    return np.arctan2(second, first), np.hypot(first, second)


def by_hand(*, whole: bool, learned: int = LEARNED) -> list[float]:
    """Section 3.2 of the paper, pair by pair."""
    ends = [
        PAIRS * math.log(learned / (turns * 2 * math.pi)) / math.log(THETA) for turns in (32, 1)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if whole else ends
    angles = []
    for pair in range(PAIRS):
        plain = THETA ** (-pair / PAIRS)
        slowed = min(1, max(0, (pair - max(low, 0)) / (high - max(low, 0))))
        angles.append(plain * (1 - slowed) + plain / FACTOR * slowed)
    return angles


@pytest.mark.parametrize(
    ("told", "angles", "size"),
    [
        ({}, by_hand(whole=True), GROWN),
        ({"truncate": False}, by_hand(whole=False), GROWN),
        ({"attention_factor": 1.0}, by_hand(whole=True), 1.0),
        ({"mscale": 2.0}, by_hand(whole=True), GROWN),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, by_hand(whole=True), 1.0),
        (
            {"original_max_position_embeddings": None},
            by_hand(whole=True, learned=512),
            GROWN,
        ),
    ],
)
def test_pairs_turn_as_config_json_says(
    told: dict, angles: list[float], size: float, tmp_path: Path
) -> None:
    seen, grown = turned(tmp_path / "eagle3", {**TOLD, **told})
    assert np.allclose(seen, angles, atol=1e-5)
    assert np.allclose(grown, size, atol=1e-5)
    assert not np.allclose(by_hand(whole=True), by_hand(whole=False), atol=1e-3)


def test_where_nothing_more_is_said_it_is_mlx_lms(tmp_path: Path) -> None:
    files = read(eagle3(tmp_path / "eagle3", rope_theta=THETA, rope_scaling=TOLD))
    assert files is not None
    theirs = YarnRoPE(
        HEAD_DIM, base=THETA, scaling_factor=FACTOR, original_max_position_embeddings=LEARNED
    )
    rows = mx.random.normal((2, 3, 5, HEAD_DIM), key=mx.random.key(1))
    for offset in (0, 7, mx.array([3, 90])):
        one, other = (rope(rows, offset=offset) for rope in (rope_of(files.sizes), theirs))
        assert mx.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"attention_factor": "1"}, "'1' for attention_factor: it has to be a number above 0"),
        ({"truncate": 0}, "0 for truncate: it has to be true or false"),
    ],
)
def test_what_is_said_of_them_is_looked_at(told: dict, match: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(eagle3(tmp_path / "eagle3", rope_scaling={**TOLD, **told}))


def test_positions_that_turn_alike_cannot_be_scaled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="1 for rope_theta: it has to be above 1"):
        read(eagle3(tmp_path / "eagle3", rope_scaling={**TOLD, "rope_theta": 1}))
