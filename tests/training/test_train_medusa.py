"""From texts to a directory of heads: what is learned from, what is written, what is refused."""

import functools
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import PromptError
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.medusa import MedusaHeads
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options
from mlx_specdec.training.collect import SampleFiles, TrainingSample, collect
from mlx_specdec.training.config import DataConfig, HeadsConfig
from mlx_specdec.training.fit import Fit
from mlx_specdec.training.medusa import HeadTask, initial_heads

from ..support import tiny, trainings
from ..support.models import make_llama, make_t5
from ..support.pairs import FIXTURES
from ..support.trainings import Watcher

trained = functools.partial(trainings.trained, "medusa")
TEXTS = trainings.TEXTS["medusa"]


@pytest.fixture(scope="module", params=["llama", "t5"])
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_llama if request.param == "llama" else make_t5
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(model: Path) -> Pair:
    return loading.load(model)


def test_what_is_written_loads_with_its_base(pair: Pair, tmp_path: Path) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert watcher.samples == [0, 1, 2, 3, 4]
    assert done.outcome.epochs == watcher.epochs[-1][0] == 2
    assert not done.resumed
    config = json.loads((done.output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert os.path.samefile(done.output / config["base_model_name_or_path"], pair.name)
    loaded = loading.load(done.output)
    settings = {"max_tokens": 10}
    plain = generate(pair, "some words", Options(**settings))
    result = generate(loaded, "some words", Options(**settings))
    assert (result.tokens, result.labels.proposer) == (plain.tokens, "auto")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("own_output", [True, False])
def test_the_layout_is_the_published_one(own_output: bool, pair: Pair, tmp_path: Path) -> None:
    done = trained(pair, tmp_path, own_output=own_output, epochs=1)
    names = set(mx.load(str(done.output / "medusa_lm_head.safetensors")))
    outputs = {"0.1.weight", "1.1.weight"} if own_output else set()
    assert names == outputs | {
        f"{head}.0.linear.{part}" for head in range(2) for part in ("weight", "bias")
    }


def rows_of(
    pair: Pair, tmp_path: Path, samples: list[TrainingSample], **settings
) -> tuple[SampleFiles, list[list[int]]]:
    tmp_path.mkdir(exist_ok=True)
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    collect(pair, samples, DataConfig(**settings), rows, lambda done, total: None)
    tokens = np.fromfile(tmp_path / "tokens.bin", np.int32).tolist()
    ends = np.cumsum(rows.lengths).tolist()
    return rows, [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_texts_are_the_models_own_and_each_state_predicts_its_token(
    pair: Pair, tmp_path: Path
) -> None:
    prompts = [pair.tokenizer.encode(text) for text in TEXTS[:3]]
    rows, found = rows_of(
        pair,
        tmp_path,
        [TrainingSample(text) for text in TEXTS[:3]],
        length=48,
        temperatures=(0.0,),
    )
    every = rows.states(np.arange(int(rows.lengths.sum())))
    best = mx.argmax(pair.target.head(every[None])[0], axis=-1).tolist()
    assert best == [token for text in found for token in text]
    for prompt, text in zip(prompts, found, strict=True):
        again = generate(pair, prompt, Options(max_tokens=len(text), regular=True))
        assert list(again.tokens) == text


def test_without_self_distillation_the_data_is_learned(pair: Pair, tmp_path: Path) -> None:
    samples = [
        TrainingSample("some words", "and more words"),
        TrainingSample("other", "some words"),
    ]
    _, found = rows_of(pair, tmp_path, samples, length=100, self_distill=False)
    assert found == [pair.tokenizer.encode(sample.target) for sample in samples]


def test_other_weights_under_the_same_name_begin_anew(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(steps=1))
    again = loading.load(pair.name)
    network = again.target.network
    network.update(tree_map(lambda array: 1.1 * array, network.parameters()))
    assert not trained(again, tmp_path).resumed


def test_a_translator_needs_targets_without_self_distillation(tmp_path: Path) -> None:
    pair = loading.load(make_t5(tmp_path))
    with pytest.raises(PromptError, match='with "target"'):
        rows_of(
            pair, tmp_path / "rows", [TrainingSample(text) for text in TEXTS], self_distill=False
        )


# HeadsConfig: heads learn, stop in time, and lose nothing by an interruption.


SIZE = tiny.VOCABULARY


@pytest.fixture(scope="module")
def base() -> Base:
    return DecoderOnlyModel(tiny.build("llama"))


def counting(directory: Path, width: int, samples: int = 12) -> SampleFiles:
    """Return texts that count modulo 8, with states that determine the next number."""
    directory.mkdir(exist_ok=True)
    rows = SampleFiles(directory, width, mx.float32)
    marks = mx.random.normal((8, width), key=mx.random.key(1))
    for sample in range(samples):
        tokens = [(sample + place) % 8 for place in range(10)]
        rows.append([8 + token for token in tokens], marks[mx.array(tokens)])
    return rows


def fit_of(heads: MedusaHeads, rows: SampleFiles, settings: HeadsConfig, file: Path) -> Fit:
    return Fit(HeadTask(heads, rows, settings), file)


def ignore(*arguments: object) -> None:
    return None


@pytest.mark.parametrize("own_output", [True, False])
def test_fresh_heads_say_what_the_base_says(own_output: bool, base: Base) -> None:
    scaled = load_model(FIXTURES / "tied-scaled-relu", dtype="float32").model
    for model in (base, scaled):
        heads = initial_heads(model, 2, 2, own_output=own_output)
        state = mx.random.normal((1, 1, model.width), key=mx.random.key(2))
        logits = heads.logits(state, 2)
        expected = model.head(state)
        assert mx.allclose(logits, mx.repeat(expected, 2, axis=1), atol=1e-5)


@pytest.mark.parametrize("own_output", [True, False])
def test_heads_learn_what_can_be_learned(own_output: bool, base: Base, tmp_path: Path) -> None:
    heads = initial_heads(base, 2, 1, own_output=own_output)
    settings = HeadsConfig(heads=2, epochs=15, batch=16, learning_rate=0.02, own_output=own_output)
    accuracies, losses = [], []
    rows = counting(tmp_path, base.width)
    fit = fit_of(heads, rows, settings, tmp_path / "c.safetensors")
    outcome = fit.run(
        lambda done, total, value: losses.append(value),
        lambda epoch, accuracy: accuracies.append(accuracy),
    )
    assert losses[-1] < 0.1 * losses[0]
    assert outcome.figures.top1 == outcome.figures.top5 == (1.0, 1.0)
    assert outcome.figures.loss == pytest.approx(min(one.loss for one in accuracies), abs=1e-5)
    task = HeadTask(heads, rows, settings)
    assert (len(task.train), len(task.held_out)) == (110, 10)
