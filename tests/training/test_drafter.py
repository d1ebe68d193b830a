"""From texts to the directory of a drafter on hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.models.drafters import kinds as speculators
from mlx_specdec.options import Options
from mlx_specdec.training import drafter as drafter_files
from mlx_specdec.training import fit
from mlx_specdec.training.anchors import Drafted
from mlx_specdec.training.config import DataConfig, DrafterConfig
from mlx_specdec.training.drafter import TASKS, train
from mlx_specdec.training.run import Trained

from ..support import heads
from ..support.models import make_llama, make_t5

TEXTS = ["some words", "other words of"] * 4
"""What is held out was learned: nothing of random models can be foreseen otherwise."""
MAKE = {"llama": make_llama, "t5": make_t5}


class Watcher:
    """Notes what it is told; interrupts after so many steps."""

    def __init__(self, steps: int | None = None) -> None:
        self._last = steps
        self.steps: list[int] = []
        self.epochs: list[tuple[int, Drafted]] = []

    def collected(self, done: int, total: int) -> None:
        return None

    def stepped(self, done: int, total: int, loss: float) -> None:
        self.steps.append(done)
        if done == self._last:
            raise KeyboardInterrupt

    def measured(self, epoch: int, drafted: Drafted) -> None:
        self.epochs.append((epoch, drafted))


@pytest.fixture(scope="module", params=MAKE)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(model: Path) -> Pair:
    return loading.load(model)


def trained(
    pair: Pair, directory: Path, watcher: Watcher | None = None, **asked: object
) -> Trained:
    directory.mkdir(exist_ok=True)
    file = directory / "texts"
    file.write_text("\n".join(TEXTS))
    usual = {"epochs": 5, "batch": 2, "learning_rate": 0.01, "patience": 6, "num_draft": 3}
    config = DrafterConfig(**{**usual, **asked})
    data = DataConfig(length=16, temperatures=(0.0,))
    return train(pair, file, directory / "drafter", data, config, watcher or Watcher())


def weights(drafter: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(drafter / "model.safetensors")))


@pytest.mark.parametrize("kind", TASKS)
def test_a_drafter_is_trained_and_drafts(
    kind: str, pair: Pair, model: Path, tmp_path: Path
) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher, kind=kind)
    assert done.outcome.best > 0
    assert done.outcome.figures.loss < done.start.loss
    assert sum(done.outcome.figures.tokens) > sum(done.start.tokens) + 0.1
    assert watcher.epochs[0] == (0, done.start)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    loaded = loading.load(model, done.output)
    assert loaded.speculator is not None and loaded.speculator.kind == kind
    accepted = 0
    for temperature in (0.0, 1.0):
        asked = {"max_tokens": 20, "temperature": temperature, "seed": 3}
        plain = generate(pair, "some words", Options(regular=True, **asked))
        result = generate(loaded, "some words", Options(num_draft=3, **asked))
        assert result.tokens == plain.tokens
        assert result.stats.drafted > 0
        accepted += result.stats.accepted
    assert accepted > 0
    told = json.loads((done.output / "provenance.json").read_text())
    assert told["held_out"]["result"]["greedy"] == list(done.outcome.figures.greedy)
    assert told["best_epoch"] == done.outcome.best
    assert told["files"].keys() >= {"model.safetensors", "config.json"}
    assert str(model.parent) not in json.dumps(told)


@pytest.mark.parametrize("kind", ["dspark", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_interrupted_training_ends_with_the_same_bits(
    kind: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "STEPS_BETWEEN", 2)
    expected = trained(pair, tmp_path / "whole", kind=kind, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path / "broken", Watcher(3), kind=kind, epochs=2)
    assert not (tmp_path / "broken" / "drafter").exists(), "nothing half-written"
    watcher = Watcher()
    done = trained(pair, tmp_path / "broken", watcher, kind=kind, epochs=2)
    assert done.resumed
    assert 1 < watcher.steps[0] <= 4
    assert done.outcome == expected.outcome
    found, right = weights(done.output), weights(expected.output)
    assert found.keys() == right.keys()
    assert all(mx.array_equal(found[name], right[name]) for name in right)


def test_without_a_gain_the_start_is_kept(pair: Pair, tmp_path: Path) -> None:
    done = trained(pair, tmp_path, epochs=4, patience=2, learning_rate=1e-12)
    assert (done.outcome.best, done.outcome.epochs) == (0, 2)
    assert done.outcome.figures.tokens == pytest.approx(done.start.tokens, abs=0.02)


def test_a_dspark_is_written_as_the_package_speculators_has_it(pair: Pair, tmp_path: Path) -> None:
    done = trained(pair, tmp_path, epochs=1, layers=2)
    config = json.loads((done.output / "config.json").read_text())
    fixture = Path(__file__).parents[1] / "fixtures" / "drafters" / "dspark-rnn"
    reference = json.loads((fixture / "config.json").read_text())
    own = {"auto_map", "target_hidden_size", "transformers_version", "sliding_window_non_causal"}
    assert reference.keys() - config.keys() <= own
    stored = mx.load(str(fixture / "model.safetensors"))
    # Attending to an encoder is this package's own.
    known = {name for name in weights(done.output) if "encoder_" not in name}
    one_layer = {name for name in known if not name.startswith("layers.1.")}
    assert one_layer == stored.keys() - {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}
    assert config["aux_hidden_state_layer_ids"] == [1], "layers by their inputs"
    assert {array.dtype for array in weights(done.output).values()} == {mx.bfloat16}
    files = speculators.read(done.output)
    assert files is not None and files.tapped == (0,)


def test_an_eagle3_is_written_as_its_authors_have_it(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_files, "MOST_OWN_TOKENS", 20)
    done = trained(pair, tmp_path, kind="eagle3", epochs=1)
    found = weights(done.output)
    fixture = Path(__file__).parents[1] / "fixtures" / "drafters" / "eagle3-authors"
    assert {"midlayer.hidden_norm.weight", "fc.weight", "lm_head.weight", "norm.weight"} < set(
        found
    )
    assert not any(name.startswith("layers.") for name in found)
    config = json.loads((done.output / "config.json").read_text())
    reference = json.loads((fixture / "config.json").read_text())
    assert reference.keys() - config.keys() <= {"pad_token_id"}
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0]}
    ids = np.arange(20) + np.array(found["d2t"])
    assert np.array_equal(np.flatnonzero(np.array(found["t2d"])), ids)
    assert found["t2d"].shape == (pair.target.vocabulary,)
    files = speculators.read(done.output)
    assert files is not None and files.target_ids == tuple(ids.tolist())
    assert files.without_encoder is (files.encoder_width is None)


def test_layers_between_the_ends_are_read() -> None:
    found = {layers: drafter_files.tapped(layers) for layers in (1, 2, 3, 4, 8, 36)}
    assert found == {
        1: (0,),
        2: (0,),
        3: (1,),
        4: (1, 2),
        8: (1, 3, 6),
        36: (1, 17, 34),
    }


def test_heads_are_no_target(tmp_path: Path) -> None:
    make_llama(tmp_path / "base")
    pair = loading.load(heads.write(tmp_path / "given", "../base"))
    with pytest.raises(OptionError, match="is Medusa heads: give the base"):
        trained(pair, tmp_path)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"layers": 0}, "layers must be 1 or more"),
        ({"num_draft": 0}, "num-draft must be 1 to 32, not 0"),
        ({"num_draft": 33}, "num-draft must be 1 to 32, not 33"),
    ],
)
def test_settings_out_of_range_are_refused(asked: dict, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        DrafterConfig(**asked)
