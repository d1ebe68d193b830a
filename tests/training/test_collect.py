"""What is collected for training."""

import json
from pathlib import Path

import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.request import encode
from mlx_specdec.options import Options
from mlx_specdec.training.collect import TrainingSample, _pieces
from mlx_specdec.training.config import DataConfig

from ..support.models import make_t5


@pytest.mark.parametrize("self_distill", [True, False])
def test_prompts_begin_with_the_prefix_that_the_target_wants(
    self_distill: bool, tmp_path: Path
) -> None:
    directory = make_t5(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["task_specific_params"] = {"translation": {"prefix": "translate: "}}
    (directory / "config.json").write_text(json.dumps(config))
    pair = load(directory)
    samples = [
        TrainingSample("some words", "a text"),
        TrainingSample("translate: other words", "a text"),
    ]
    pieces = list(_pieces(pair, samples, DataConfig(length=64, self_distill=self_distill)))
    wanted = [tuple(encode(pair, sample.prompt, Options())) for sample in samples]
    assert [prompt for prompt, _ in pieces] == wanted
