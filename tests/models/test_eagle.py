"""What P-EAGLE does in one pass, and scaled positions of drafters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.models.drafters.eagle import Eagle3
from mlx_specdec.models.drafters.kinds import read
from mlx_specdec.models.drafters.layers import rope_of

from ..support import speculators
from ..support.lender import Lender, Run, network_of
from ..support.speculators import HEAD_DIM, eagle3

WIDTH, VOCABULARY = speculators.WIDTH, speculators.VOCABULARY


def test_a_round_of_a_p_eagle_is_one_pass(tmp_path: Path, monkeypatch) -> None:
    passes: list[int] = []
    step = Eagle3.step

    def counted(self, tokens, *rest):
        passes.append(tokens.shape[1])
        return step(self, tokens, *rest)

    monkeypatch.setattr(Eagle3, "step", counted)
    directory = speculators.peagle(tmp_path / "peagle")
    embedding = mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(0))
    hidden = mx.random.normal((20, 3 * WIDTH), key=mx.random.key(1))
    run = Run(network_of(directory, Lender(embedding)), [5] * 20, hidden)
    for length, count in ((6, 4), (7, 4), (7, 3), (10, 1)):
        run.draft(length, count)
    # What was accepted, with the places behind it; the third round had nothing new to read.
    assert passes == [5 + 3, 1 + 3, 2, 3]


# Scaled positions of drafters, as transformers turns them.


PAIRS, THETA, FACTOR, LEARNED = HEAD_DIM // 2, 500.0, 8.0, 64
REPORT = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": LEARNED}
GROWN = 0.1 * math.log(FACTOR) + 1


def turned(
    directory: Path, report: dict[str, Any], **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """How far one position turns each pair, in radians, and how much it grows."""
    settings = {
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "rope_scaling": report,
        **changes,
    }
    files = read(eagle3(directory, **settings))
    assert files is not None
    ones = mx.concatenate([mx.ones(PAIRS), mx.zeros(PAIRS)]).reshape(1, 1, 1, -1)
    first, second = np.split(np.array(rope_of(files.sizes)(ones, offset=1)).ravel(), 2)
    return np.arctan2(second, first), np.hypot(first, second)


def by_hand(*, truncated: bool, learned: int = LEARNED) -> list[float]:
    """Section 3.2 of the paper, pair by pair."""
    ends = [
        PAIRS * math.log(learned / (turns * 2 * math.pi)) / math.log(THETA) for turns in (32, 1)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncated else ends
    angles = []
    for pair in range(PAIRS):
        plain = THETA ** (-pair / PAIRS)
        slowed = min(1, max(0, (pair - max(low, 0)) / (high - max(low, 0))))
        angles.append(plain * (1 - slowed) + plain / FACTOR * slowed)
    return angles


@pytest.mark.parametrize(
    ("report", "angles", "size"),
    [
        ({}, by_hand(truncated=True), GROWN),
        ({"truncate": False}, by_hand(truncated=False), GROWN),
        ({"attention_factor": 1.0}, by_hand(truncated=True), 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, by_hand(truncated=True), 1.0),
    ],
)
def test_pairs_turn_as_config_json_says(
    report: dict, angles: list[float], size: float, tmp_path: Path
) -> None:
    angles_found, grown = turned(tmp_path / "eagle3", {**REPORT, **report})
    assert np.allclose(angles_found, angles, atol=1e-5)
    assert np.allclose(grown, size, atol=1e-5)
    assert not np.allclose(by_hand(truncated=True), by_hand(truncated=False), atol=1e-3)
