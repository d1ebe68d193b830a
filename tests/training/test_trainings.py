"""Properties of every training: it resumes after an interruption, and refuses unusable data."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError, OutputError, PromptError
from mlx_specdec.training import fit
from mlx_specdec.training.config import (
    DataConfig,
    DistillConfig,
    DrafterConfig,
    HeadsConfig,
)
from mlx_specdec.training.fit import Trained

from ..support import heads
from ..support.models import make_llama, make_t5
from ..support.trainings import TEXTS, Watcher, output_of, trained, weights

MAKE = {"llama": make_llama, "t5": make_t5}
INTERRUPTIONS = [
    ("medusa", "t5", {"samples": 2}),
    ("medusa", "llama", {"steps": 1}),
    ("medusa", "llama", {"steps": 3}),
    ("draft", "t5", {"steps": 3}),
    ("draft", "llama", {"steps": 5}),
    *(("dspark", family, {"steps": 3}) for family in MAKE),
]
"""All training kinds for both families. How training resumes does not depend on the family."""


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    """Return a function that loads a tiny target of a family, with a draft if a draft is to be
    trained."""

    @functools.cache
    def directory(family: str, seed: int) -> Path:
        return MAKE[family](tmp_path_factory.mktemp(f"{family}-{seed}"), seed)

    @functools.cache
    def pair(kind: str, family: str) -> Pair:
        return load(*(directory(family, seed) for seed in ((0, 1) if kind == "draft" else (0,))))

    return pair


@pytest.fixture(scope="module")
def whole(
    pair_of: Callable[[str, str], Pair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Trained]:
    """Return a function that trains a kind for a family, once, without an interruption."""

    @functools.cache
    def train(kind: str, family: str) -> Trained:
        pair = pair_of("draft" if kind == "draft" else "", family)
        return trained(kind, pair, tmp_path_factory.mktemp("whole"), epochs=2)

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "stop"), INTERRUPTIONS)
def test_an_interrupted_training_ends_with_the_same_weights(
    kind: str,
    family: str,
    stop: dict[str, int],
    pair_of: Callable[[str, str], Pair],
    whole: Callable[[str, str], Trained],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = pair_of("draft" if kind == "draft" else "", family)
    monkeypatch.setattr(fit, "STEPS_BETWEEN", 2)
    expected = whole(kind, family)
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        trained(kind, pair, broken, Watcher(**stop), epochs=2)
    assert not output_of(kind, broken).exists(), "nothing half-written"
    watcher = Watcher()
    done = trained(kind, pair, broken, watcher, epochs=2)
    assert done.resumed
    assert watcher.samples[0] == stop.get("samples", watcher.samples[-1])
    assert stop.get("steps", 0) - 2 < watcher.steps[0] <= stop.get("steps", 0) + 1
    assert done.outcome == expected.outcome
    found, right = weights(done.output), weights(expected.output)
    assert found.keys() == right.keys()
    close = 1e-3 if kind == "medusa" else 0.0
    assert all(mx.allclose(found[name], right[name], rtol=0, atol=close) for name in right)


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_data_without_use_is_refused_and_nothing_is_written(
    kind: str, pair_of: Callable[[str, str], Pair], tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match="fewer than two texts"):
        trained(kind, pair_of(kind, "llama"), tmp_path, texts=["only one"])
    assert not output_of(kind, tmp_path).exists()


@pytest.mark.parametrize("kind", TEXTS)
def test_an_output_that_exists_is_left_alone(
    kind: str, pair_of: Callable[[str, str], Pair], tmp_path: Path
) -> None:
    output = output_of(kind, tmp_path)
    output.mkdir()
    match = f"{output.name} exists: delete it, or choose another --output"
    with pytest.raises(OutputError, match=match):
        trained(kind, pair_of(kind, "llama"), tmp_path)


@pytest.mark.parametrize("kind", TEXTS)
def test_heads_are_no_target(kind: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    make_llama(tmp_path / "base")
    pair = load(heads.write(tmp_path / "given", "../base"))
    with pytest.raises(OptionError, match=r"already: give the base|is Medusa heads: give the base"):
        trained(kind, pair, tmp_path, layers=1)


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (DataConfig, {"samples": 1}, "samples must be 2 or more"),
        (DataConfig, {"length": 7}, "length must be 8"),
        (HeadsConfig, {"heads": 0}, "heads must be 1 to 16"),
        (HeadsConfig, {"heads": 17}, "heads must be 1 to 16"),
        (HeadsConfig, {"batch": 0}, "batch"),
        (HeadsConfig, {"epochs": 0}, "epochs"),
        (HeadsConfig, {"patience": 0}, "patience"),
        (HeadsConfig, {"learning_rate": 0}, "learning-rate"),
        (DistillConfig, {"batch": 0}, "batch must be 1"),
        (DistillConfig, {"layers": 0}, "layers must be 1"),
        (DrafterConfig, {"layers": 0}, "layers must be 1 or more"),
        (DrafterConfig, {"num_draft": 0}, "num-draft must be 1 to 32, not 0"),
        (DrafterConfig, {"num_draft": 33}, "num-draft must be 1 to 32, not 33"),
    ],
)
def test_settings_out_of_range_are_refused(
    config: type, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(OptionError, match=match):
        config(**settings)
