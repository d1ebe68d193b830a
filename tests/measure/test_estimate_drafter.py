"""Drafters on hidden states known by config.json alone: their sizes, and what they cost."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from mlx_specdec.checkpoints.quantization import Quantization
from mlx_specdec.errors import CheckpointError
from mlx_specdec.measure.estimate import (
    DrafterOutline,
    DrafterSource,
    ModelSource,
    estimate,
    speeds,
)
from mlx_specdec.measure.passes import PassCosts
from mlx_specdec.models.drafters.kinds import outline, read
from mlx_specdec.models.kv_cache import STEP
from mlx_specdec.models.number_format import NumberFormat

from ..support.estimates import LLAMA, QUICK, T5, ticking
from ..support.speculators import (
    HEAD_DIM,
    KV_HEADS,
    MAKERS,
    eagle3,
    speculators_eagle3,
)

GEMMA = Path(__file__).parents[1] / "fixtures" / "gemma4_assistant"

TARGETS = {"llama": LLAMA, "t5": T5}
MOST = {"dflash": 3, "dflash2": 3, "dspark": 4}
"""Tokens in a block of these fixtures."""
KINDS = {**MAKERS, "speculators": speculators_eagle3}


def config_of(directory: Path) -> Path:
    """The directory without its weights."""
    for file in directory.glob("model*"):
        file.unlink()
    return directory


def source_of(directory: Path, **numbers) -> DrafterSource:
    files = outline(directory)
    assert files is not None
    return DrafterSource("drafter", files, **numbers)


@pytest.mark.parametrize("name", KINDS)
def test_config_json_tells_what_the_files_hold(name: str, tmp_path: Path) -> None:
    directory = KINDS[name](tmp_path / "whole", encoder=32)
    files = read(directory)
    described = outline(config_of(Path(shutil.copytree(directory, tmp_path / "config"))))
    assert files is not None and described is not None
    # What is there by presence alone is norms and a head of a few numbers.
    left = files.tensors.shapes.keys() - described.tensors.shapes.keys()
    assert all(re.search(r"[qk]_norm\.weight|confidence_head", name) for name in left)
    assert described.tensors.shapes.items() <= files.tensors.shapes.items()
    assert described.facts() == files.facts()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        case
        if case in (("dspark", "llama"), ("eagle3", "t5"))
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(KINDS, TARGETS)
    ],
)
def test_a_drafter_is_measured_from_two_configurations(
    name: str, family: str, tmp_path: Path
) -> None:
    target = TARGETS[family]
    width, size = target.get("d_model", 32), target["vocab_size"]
    encoder = {"encoder": width} if "d_model" in target else {}
    directory = KINDS[name](tmp_path / name, width=width, vocabulary=size, **encoder)
    report = estimate(
        ModelSource("big", target), source_of(config_of(directory)), **QUICK, clock=ticking()
    )
    assert report.proposer == ("eagle3" if name == "speculators" else name)
    assert report.speeds is not None and report.fits
    longest = max(prediction.num_draft for prediction in report.speeds.predictions)
    assert longest <= MOST.get(name, 16)
    assert report.draft.vocabulary == size
    assert report.draft.weights_bytes > 0 and report.draft.caches_bytes > 0
    assert json.loads(json.dumps(report.as_dict()))["proposer"] == report.proposer


def test_predictions_stop_at_the_longest_draft() -> None:
    target = PassCosts(None, {1: 1.0, 17: 1.4}, step=1.0)
    draft = PassCosts(0.01, {}, start=0.1)
    assert [one.num_draft for one in speeds(target, draft, 3).predictions][-1] == 3
    assert [one.num_draft for one in speeds(target, draft).predictions][-1] == 16


def test_weights_that_are_here_count_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = eagle3(tmp_path / "drafter")
    files = read(directory)
    assert files is not None
    report = estimate(ModelSource("big", LLAMA), source_of(directory), **QUICK, clock=ticking())
    assert report.draft.weights_bytes == sum(array.nbytes for array in files.tensors.values())
    monkeypatch.setattr("mlx_specdec.measure.estimate.usable_memory", lambda: 0)
    halves = DrafterSource("drafter", files, "bfloat16")
    small = estimate(ModelSource("big", LLAMA), halves, **QUICK, clock=ticking())
    assert small.draft.weights_bytes == report.draft.weights_bytes / 2
    assert (small.draft.dtype, small.fits, small.speeds) == ("bfloat16", False, None)


def test_a_drafter_is_computed_with_as_the_user_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool | None] = []
    monkeypatch.setattr(NumberFormat, "expands", lambda self, count: taken.append(self.expand))
    files = eagle3(tmp_path / "drafter")
    source, target = source_of(config_of(files), expand=False), ModelSource("big", LLAMA).outline()
    monkeypatch.setattr(source.files.tensors, "quantized", {"fc": Quantization(4, 32)})
    DrafterOutline(source, target)
    assert taken == [None, False]


def test_an_assistant_of_gemma_is_known_by_config_json(tmp_path: Path) -> None:
    directory, target = (GEMMA / "dense" / name for name in ("assistant", "target"))
    files = read(directory)
    source = source_of(config_of(Path(shutil.copytree(directory, tmp_path / "config"))))
    assert files is not None
    assert source.files.tensors.shapes == files.tensors.shapes
    assert source.files.facts() == files.facts()
    config = json.loads((target / "config.json").read_text())
    report = estimate(ModelSource("target", config), source, **QUICK, clock=ticking())
    assert report.proposer == "gemma4_assistant" and report.speeds is not None
    ordered = shutil.copytree(GEMMA / "ordered" / "assistant", tmp_path / "ordered")
    assert outline(config_of(Path(ordered))) is not None


def test_caches_hold_the_text_and_the_source(tmp_path: Path) -> None:
    target = ModelSource("t5", T5).outline()
    width, size = T5["d_model"], T5["vocab_size"]
    shape = {"width": width, "vocabulary": size, "drafted": None}
    plain, encoder = (
        DrafterOutline(source_of(config_of(eagle3(tmp_path / name, **shape, **more))), target)
        for name, more in (("plain", {}), ("encoder", {"encoder": width}))
    )
    position = 2 * KV_HEADS * HEAD_DIM * 4
    assert plain.cache_nbytes(100, 8) == STEP * position
    assert encoder.cache_nbytes(100, 8) == (STEP + 100) * position


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    for number, (more, match) in enumerate(
        (
            ({"width": 48}, "hidden states of width 48, and this one has 32"),
            ({"vocabulary": 50, "drafted": 20}, "a vocabulary of 50, and this one has 64"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}, "reads what layer 98"),
            ({"encoder": 32}, "an encoder of width 32, and this one is decoder-only"),
        )
    ):
        drafter = source_of(config_of(eagle3(tmp_path / f"{number}", **more)))
        with pytest.raises(CheckpointError, match=match):
            estimate(ModelSource("big", LLAMA), drafter, **QUICK)
