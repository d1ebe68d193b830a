"""Drafters' arithmetic against the package `speculators`, passes, windows and scaled positions.

tests/fixtures/make_drafters.py and make_mtp.py wrote the fixtures: each round is computed
from the beginning there. The latter's reference is transformers where `speculators` has none.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.kinds import read
from mlx_specdec.models.drafters.layers import rope_of

from ..support.lender import FIXTURES, LIMIT, Lender, Run, differ, drafts_of, network_of
from ..support.speculators import HEAD_DIM, WIDTH, eagle3

CASES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_package_speculators_round_after_round(name: str) -> None:
    reference = mx.load(str(FIXTURES / name / "reference.st"), format="safetensors")
    target = Lender(reference["embedding"], reference.get("head"))
    network = network_of(FIXTURES / name, target)
    run = Run(network, reference["tokens"].tolist(), reference["hidden"])
    ids = reference["known"]
    assert ("chances" in reference) is name.startswith("dspark") is network.stops
    rounds = 0
    for length, logits, expected in zip(
        reference["lengths"].tolist(), reference["logits"], reference["drafted"], strict=True
    ):
        drafted, rows = run.draft(length, logits.shape[0])
        if network.stops:
            report = run.chances()
            assert mx.max(mx.abs(report - reference["chances"][rounds])).item() <= LIMIT
        assert drafted == expected.tolist()
        drafted_rows, candidates = rows[:, ids], mx.isfinite(logits)
        assert mx.array_equal(mx.isfinite(drafted_rows), candidates)
        assert mx.max(mx.where(candidates, mx.abs(drafted_rows - logits), 0)).item() <= LIMIT
        absent = np.setdiff1d(np.arange(target.vocabulary), np.array(ids))
        assert np.all(np.isneginf(np.array(rows)[:, absent]))
        rounds += 1
    assert rounds == 9


def test_the_head_of_specforge_may_be_given_what_no_norm_has_seen(tmp_path: Path) -> None:
    normed = drafts_of(eagle3(tmp_path / "1"))
    plain = drafts_of(eagle3(tmp_path / "2", norm_output=False))
    assert differ(normed, plain)
    # Both feed back the same states, and only the logits differ.
    ones = {"norm.weight": mx.ones((WIDTH,))}
    scaled = eagle3(tmp_path / "3", tensors=ones)
    unscaled = eagle3(tmp_path / "4", tensors=ones, norm_output=False)
    first, second = drafts_of(scaled, count=1)[0], drafts_of(unscaled, count=1)[0]
    ratio = second[1] / first[1]
    assert mx.allclose(second[1::2], first[1::2] * ratio, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 99}, "does not describe a model"),
        ({"num_attention_heads": 2}, "has shape"),
        ({"hidden_size": "wide"}, "can be built .StrictDataclass.*'hidden_size'"),
        ({"model_type": "mixtral"}, "'mixtral', which is not supported"),
    ],
)
def test_a_layer_whose_configuration_cannot_be_is_refused(
    changes: dict, says: str, tmp_path: Path
) -> None:
    """mlx-lm, which computes it, believes its configurations."""
    for file in (FIXTURES / "mtp-qwen3-next").glob("[cm]*"):
        shutil.copyfile(file, tmp_path / file.name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        network_of(tmp_path, Lender(mx.zeros((40, 16))))


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
