"""Drafters' arithmetic against the package `speculators`, passes, windows and scaled positions.

benchmarks/make_drafters.py and make_mtp.py wrote the fixtures: each round is computed
from the beginning there. The latter's reference is transformers where `speculators` has none.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.errors import CheckpointError

from ..support.lender import FIXTURES, LIMIT, Lender, Run, differ, drafts_of, network_of
from ..support.speculators import WIDTH, eagle3

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
