"""What is collected for training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.request import encode
from mlx_specdec.options import Options
from mlx_specdec.training.collect import Sample, _pieces, batches
from mlx_specdec.training.config import DataConfig

from ..support.models import make_t5


def test_batches_hold_every_prompt_once_and_lengths_that_are_close() -> None:
    lengths = [7, 3, 9, 3, 8, 1, 30, 2, 31, 29, 5]
    found = batches(lengths, 3, seed=1)
    assert sorted(number for batch in found for number in batch) == list(range(11))
    assert {tuple(sorted(lengths[n] for n in batch)) for batch in found} == {
        (1, 2, 3),
        (3, 5, 7),
        (8, 9, 29),
        (30, 31),
    }
    assert found == batches(lengths, 3, seed=1)
    assert found != batches(lengths, 3, seed=2)


def test_batches_keep_kinds_apart_that_take_turns() -> None:
    lengths = [7, 3, 9, 3, 8, 1, 30, 2]
    found = batches(lengths, 2, seed=1, kinds=2)
    assert sorted(number for batch in found for number in batch) == list(range(8))
    assert {tuple(sorted(lengths[n] for n in batch)) for batch in found} == {
        (7, 8),
        (9, 30),
        (1, 2),
        (3, 3),
    }


@pytest.mark.parametrize("self_distill", [True, False])
def test_prompts_begin_with_the_prefix_that_the_target_wants(
    self_distill: bool, tmp_path: Path
) -> None:
    directory = make_t5(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["task_specific_params"] = {"translation": {"prefix": "translate: "}}
    (directory / "config.json").write_text(json.dumps(config))
    pair = load(directory)
    samples = [Sample("some words", "a text"), Sample("translate: other words", "a text")]
    pieces = list(_pieces(pair, samples, DataConfig(length=64, self_distill=self_distill)))
    wanted = [tuple(encode(pair, sample.prompt, Options())) for sample in samples]
    assert [prompt for prompt, _ in pieces] == wanted
