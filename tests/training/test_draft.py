"""From texts to a draft model's directory: what is learned, what is written, what is refused."""

import functools
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import VocabularyError
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.options import Options
from mlx_specdec.training import draft as draft_files
from mlx_specdec.training.draft import (
    Initial,
    forward,
    log_probabilities,
)
from mlx_specdec.training.fit import round_as_stored

from ..support import tiny, trainings
from ..support.models import make_llama, make_pegasus, make_t5, t5_models
from ..support.pairs import FIXTURES
from ..support.trainings import Watcher, weights

trained = functools.partial(trainings.trained, "draft")
MAKE = {"llama": make_llama, "t5": make_t5, "pegasus": make_pegasus}


@pytest.fixture(scope="module", params=MAKE)
def models(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft with other weights and the same tokenizer."""
    make = MAKE[request.param]
    parts = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in (0, 1)]
    return make(parts[0], 0), make(parts[1], 1)


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Pair:
    return loading.load(*models)


def test_a_draft_comes_closer_to_its_target(pair: Pair, tmp_path: Path) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert np.mean(watcher.losses[-2:]) < 0.7 * np.mean(watcher.losses[:2])
    assert done.outcome.best > 0
    assert done.outcome.figures.acceptance > done.start.acceptance + 0.04
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
    report = json.loads((done.output / "provenance.json").read_text())
    assert (report["target"], report["start"]) == tuple(path.name for path in models)
    assert report["held_out"]["result"]["acceptance"] == done.outcome.figures.acceptance
    assert report["held_out"]["start"]["acceptance"] == done.start.acceptance
    assert report["best_epoch"] == done.outcome.best
    assert report["files"].keys() >= {"model.safetensors", "config.json"}
    assert not any(str(path.parent) in json.dumps(report) for path in models)
    config = json.loads((done.output / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {array.dtype for array in weights(done.output).values()} == {mx.bfloat16}


def test_a_layer_is_enough_to_begin_with(models: tuple[Path, Path], tmp_path: Path) -> None:
    done = trained(loading.load(models[0]), tmp_path, layers=1, epochs=4)
    # Without a gain the start is kept, and rounded to bfloat16.
    assert done.outcome.figures.acceptance >= done.start.acceptance - 1e-3
    loaded = loading.load(models[0], done.output)
    result = generate(loaded, "some words", Options(max_tokens=6, num_draft=2))
    assert result.stats.drafted > 0


def test_without_a_gain_the_start_is_kept(models: tuple[Path, Path], tmp_path: Path) -> None:
    pair = loading.load(models[0], models[0])
    done = trained(pair, tmp_path, epochs=3, patience=1, learning_rate=0.3)
    assert (done.outcome.best, done.outcome.epochs) == (0, 1)
    assert done.outcome.figures.acceptance > 0.97
    found, start = weights(done.output), weights(models[0])
    assert all(mx.array_equal(found[name], start[name].astype(mx.bfloat16)) for name in start)


def test_a_draft_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    target, narrow = make_llama(tmp_path / "target"), tmp_path / "narrow"
    shutil.copytree(target, narrow)
    size = loading.load(target).vocabulary
    tiny.write("llama", narrow, vocab_size=size - 3)
    with pytest.raises(VocabularyError, match=f"knows {size - 3} of the target's {size} tokens"):
        trained(loading.load(target, narrow), tmp_path)


# Trained networks of many families on disk: what is written is what is read again.


BARTS = ("bart", "m2m100", "marian-two-vocabularies", "mbart", "pegasus")
OTHERS = ["../t5gemma2/grouped", *(f"../bart/{name}" for name in BARTS)]
FAMILIES = ["llama", "gemma3_wrapped", "mixtral", "deepseek_v3", "mamba2", "falcon_h1", "lfm2"]


def source(name: str, tmp_path: Path) -> Path:
    return tiny.write(name, tmp_path / "model") if name in FAMILIES else FIXTURES / name


@pytest.mark.parametrize("name", [*FAMILIES, *t5_models(), *OTHERS])
def test_every_family_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    directory = source(name, tmp_path)
    model = load_model(directory, dtype="float32").model
    draft = trainable(model)
    network = draft.network
    round_as_stored(network)
    output = tmp_path / "output"
    output.mkdir()
    initial = Initial(model, read_config(directory), directory, "words")
    draft_files.write(output, {"told": 1}, network, initial)
    again = load_model(output, dtype="float32").model
    inputs = draft.inputs([[3, 4, 5]], [[6, 7, 8]])
    found = trainable(again).logits(*inputs)
    assert mx.allclose(found, draft.logits(*inputs), atol=1e-4)
    expected = dict(tree_flatten(network.parameters()))
    for part, array in tree_flatten(again.network.parameters()):
        assert mx.array_equal(array, expected[part])
    assert json.loads((output / "provenance.json").read_text())["told"] == 1


# Values and gradients of the divergence


ROWS, SIZE = 3, 7


def logits(seed: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, SIZE))


def distribution(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def measured(target: np.ndarray, draft: mx.array) -> mx.array:
    return forward(log_probabilities(mx.array(target)), log_probabilities(draft))


def test_values_are_those_of_the_formula() -> None:
    p, q = distribution(logits(0)), distribution(logits(1))
    found = measured(logits(0), mx.array(logits(1)))
    np.testing.assert_allclose(np.array(found), (p * np.log(p / q)).sum(axis=-1), atol=1e-5)
    same = measured(logits(0), mx.array(logits(0)))
    np.testing.assert_allclose(np.array(same), np.zeros(ROWS), atol=1e-6)


def test_tokens_without_any_probability_do_no_harm() -> None:
    target, draft = logits(4), logits(5)
    target[:, 0] = draft[:, 1] = -np.inf
    value, gradient = mx.value_and_grad(lambda q: measured(target, q).sum())(mx.array(draft))
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
