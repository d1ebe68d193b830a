"""From texts to a draft model's directory: what is learned, what is written, what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError, OutputError, PromptError, VocabularyError
from mlx_specdec.options import Options
from mlx_specdec.training import fit
from mlx_specdec.training.config import DataConfig, DistillConfig, DraftConfig
from mlx_specdec.training.draft import Closeness, train
from mlx_specdec.training.run import Trained

from ..support import heads, tiny
from ..support.models import make_llama, make_t5

TEXTS = [f"{first} {second}" for first in ("some", "other", "more") for second in ("words", "of")]
MAKE = {"llama": make_llama, "t5": make_t5}


class Watcher:
    """Notes what it is told; interrupts after so many steps, by `end`."""

    def __init__(self, steps: int | None = None, end=None) -> None:
        self._last, self._end = steps, end
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.epochs: list[tuple[int, Closeness]] = []

    def collected(self, done: int, total: int) -> None:
        return None

    def stepped(self, done: int, total: int, loss: float) -> None:
        self.steps.append(done)
        self.losses.append(loss)
        if done == self._last:
            if self._end is not None:
                self._end()
            raise KeyboardInterrupt

    def measured(self, epoch: int, closeness: Closeness) -> None:
        self.epochs.append((epoch, closeness))


@pytest.fixture(scope="module", params=["llama", "t5"])
def models(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft with other weights and the same tokenizer."""
    make = MAKE[request.param]
    parts = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in (0, 1)]
    return make(parts[0], 0), make(parts[1], 1)


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Pair:
    return loading.load(*models)


def trained(
    pair: Pair,
    directory: Path,
    watcher: Watcher | None = None,
    shape: DraftConfig | None = None,
    **distilling: object,
) -> Trained:
    directory.mkdir(exist_ok=True)
    file = directory / "texts"
    file.write_text("\n".join(TEXTS))
    asked = {"epochs": 6, "batch": 2, "learning_rate": 0.01, "patience": 6, **distilling}
    return train(
        pair,
        file,
        directory / "draft",
        shape,
        DataConfig(length=24),
        DistillConfig(**asked),
        watcher or Watcher(),
    )


def weights(draft: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(draft / "model.safetensors")))


def test_a_draft_comes_closer_to_its_target(pair: Pair, tmp_path: Path) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert np.mean(watcher.losses[-2:]) < 0.7 * np.mean(watcher.losses[:2])
    assert done.outcome.best > 0
    assert done.outcome.figures.acceptance > done.start.acceptance + 0.05
    assert watcher.epochs[0] == (0, done.start)
    best = max(closeness.acceptance for _, closeness in watcher.epochs)
    assert done.outcome.figures.acceptance == pytest.approx(best, abs=0.02)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_written_is_a_draft_of_the_target(
    pair: Pair, models: tuple[Path, Path], tmp_path: Path
) -> None:
    done = trained(pair, tmp_path, epochs=2)
    plain = generate(pair, "some words", Options(max_tokens=12, regular=True))
    loaded = loading.load(models[0], done.output)
    result = generate(loaded, "some words", Options(max_tokens=12, num_draft=3))
    assert result.tokens == plain.tokens
    assert result.stats.drafted > 0
    told = json.loads((done.output / "provenance.json").read_text())
    assert (told["target"], told["start"]) == tuple(path.name for path in models)
    assert told["held_out"]["result"]["acceptance"] == done.outcome.figures.acceptance
    assert told["held_out"]["start"]["acceptance"] == done.start.acceptance
    assert told["best_epoch"] == done.outcome.best
    assert told["files"].keys() >= {"model.safetensors", "config.json"}
    assert not any(str(path.parent) in json.dumps(told) for path in models)
    config = json.loads((done.output / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {array.dtype for array in weights(done.output).values()} == {mx.bfloat16}


def test_the_pair_stays_as_it_is(pair: Pair, tmp_path: Path) -> None:
    before = [generate(pair, "some words", Options(max_tokens=8, seed=s)).tokens for s in range(2)]
    drafted = np.array(pair.draft.network.parameters()["lm_head"]["weight"])
    trained(pair, tmp_path, epochs=1)
    after = [generate(pair, "some words", Options(max_tokens=8, seed=s)).tokens for s in range(2)]
    assert before == after
    assert np.array_equal(drafted, np.array(pair.draft.network.parameters()["lm_head"]["weight"]))


def test_a_shape_is_enough_to_begin_with(models: tuple[Path, Path], tmp_path: Path) -> None:
    pair = loading.load(models[0])
    for shape in (DraftConfig(1), DraftConfig(1, 16)):
        done = trained(pair, tmp_path / f"width-{shape.width}", shape=shape, epochs=4)
        assert done.outcome.figures.acceptance >= done.start.acceptance
        loaded = loading.load(models[0], done.output)
        result = generate(loaded, "some words", Options(max_tokens=6, num_draft=2))
        assert result.stats.drafted > 0


def test_without_a_gain_the_start_is_kept(models: tuple[Path, Path], tmp_path: Path) -> None:
    pair = loading.load(models[0], models[0])
    done = trained(pair, tmp_path, epochs=3, patience=1, learning_rate=0.3)
    assert (done.outcome.best, done.outcome.epochs) == (0, 1)
    assert done.outcome.figures.acceptance > 0.98
    found, start = weights(done.output), weights(models[0])
    assert all(mx.array_equal(found[name], start[name].astype(mx.bfloat16)) for name in start)


@pytest.fixture(scope="module")
def uninterrupted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(pair, tmp_path_factory.mktemp("whole"), epochs=2)


@pytest.mark.parametrize(
    "at", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_an_interrupted_training_ends_with_the_same_bits(
    at: int,
    pair: Pair,
    uninterrupted: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "STEPS_BETWEEN", 2)
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path / "broken", Watcher(at), epochs=2)
    assert not (tmp_path / "broken" / "draft").exists(), "nothing half-written"
    watcher = Watcher()
    done = trained(pair, tmp_path / "broken", watcher, epochs=2)
    assert done.resumed
    assert at - 2 < watcher.steps[0] <= at + 1
    assert done.outcome == uninterrupted.outcome
    found, right = weights(done.output), weights(uninterrupted.output)
    assert all(mx.array_equal(found[name], right[name]) for name in right)


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    for name, seed in (("target", 0), ("start", 1)):
        make_t5(tmp_path / name, seed)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from mlx_specdec.engine import loading\n"
        "from mlx_specdec.training import fit\n"
        "from tests.training.test_draft import Watcher, trained\n"
        "fit.STEPS_BETWEEN = 2\n"
        "place, steps = Path(sys.argv[1]), int(sys.argv[2])\n"
        "pair = loading.load(place / 'target', place / 'start')\n"
        "end = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "trained(pair, place / sys.argv[3], Watcher(steps, end), epochs=2)\n"
    )

    def run(steps: int, name: str) -> int:
        command = [sys.executable, "-c", script, str(tmp_path), str(steps), name]
        return subprocess.run(command, cwd=Path(__file__).parents[2]).returncode

    assert run(99, "whole") == 0
    assert run(3, "broken") == -signal.SIGKILL
    assert not (tmp_path / "broken" / "draft").exists()
    assert run(99, "broken") == 0
    found, right = (weights(tmp_path / name / "draft") for name in ("broken", "whole"))
    assert all(mx.array_equal(found[name], right[name]) for name in right)


def test_other_settings_learn_on_the_same_texts_anew(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(3))
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher, epochs=1, divergence="tvd")
    assert (done.resumed, watcher.steps[0]) == (True, 1)


def test_another_start_begins_anew(models: tuple[Path, Path], tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(models[1], start)
    with pytest.raises(KeyboardInterrupt):
        trained(loading.load(models[0], start), tmp_path, Watcher(4))
    moved = {name: array * 1.01 for name, array in weights(start).items()}
    mx.save_safetensors(str(start / "model.safetensors"), moved)
    watcher = Watcher()
    trained(loading.load(models[0], start), tmp_path, watcher, epochs=1)
    assert watcher.steps[0] == 1


def test_data_without_use_is_refused_and_nothing_is_written(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("only one")
    with pytest.raises(PromptError, match="fewer than two texts"):
        train(pair, file, tmp_path / "draft", None, DataConfig(), DistillConfig(), Watcher())
    assert not (tmp_path / "draft").exists()


def test_an_output_that_exists_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(OutputError, match="draft exists: delete it, or choose another --output"):
        trained(pair, tmp_path)


def test_a_draft_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    target, narrow = make_llama(tmp_path / "target"), tmp_path / "narrow"
    shutil.copytree(target, narrow)
    size = loading.load(target).vocabulary
    tiny.write("llama", narrow, vocab_size=size - 3)
    with pytest.raises(VocabularyError, match=f"knows {size - 3} of the target's {size} tokens"):
        trained(loading.load(target, narrow), tmp_path)


def test_a_target_of_fewer_bits_is_no_start(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    tiny.write("llama", base, vocab_size=loading.load(base).vocabulary, hidden_size=64)
    with pytest.raises(OptionError, match="no weights of its own: give layers"):
        trained(loading.load(base, "self"), tmp_path)


def test_heads_are_no_target(tmp_path: Path) -> None:
    make_llama(tmp_path / "base")
    pair = loading.load(heads.write(tmp_path / "given", "../base"))
    with pytest.raises(OptionError, match="is Medusa heads: give the base"):
        trained(pair, tmp_path, shape=DraftConfig(1))


@pytest.mark.parametrize(
    ("kind", "asked", "match"),
    [
        (DistillConfig, {"batch": 0}, "batch must be 1"),
        (DraftConfig, {"layers": 0}, "layers must be 1"),
        (DraftConfig, {"layers": 1, "width": 0}, "width must be 1"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, asked: dict, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        kind(**asked)
