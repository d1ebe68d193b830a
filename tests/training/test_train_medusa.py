"""From texts to a directory of heads: what is learned from, what is written, what is refused."""

from __future__ import annotations

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
from mlx_specdec.errors import OptionError, OutputError, PromptError
from mlx_specdec.options import Options
from mlx_specdec.training import medusa
from mlx_specdec.training.collect import Rows, Sample, collect
from mlx_specdec.training.config import DataConfig, HeadsConfig
from mlx_specdec.training.medusa import train
from mlx_specdec.training.run import Trained

from ..support import heads
from ..support.models import make_llama, make_t5

TEXTS = ["some words", "other words than these", "words again and again", "the last"]


class Watcher:
    """Notes what it is told; interrupts when so many samples or steps are done."""

    def __init__(self, samples: int | None = None, steps: int | None = None) -> None:
        self._samples, self._steps = samples, steps
        self.samples: list[int] = []
        self.steps: list[int] = []
        self.epochs = 0

    def collected(self, done: int, total: int) -> None:
        self.samples.append(done)
        if done == self._samples:
            raise KeyboardInterrupt

    def stepped(self, done: int, total: int, loss: float) -> None:
        self.steps.append(done)
        if done == self._steps:
            raise KeyboardInterrupt

    def measured(self, epoch: int, accuracy) -> None:
        self.epochs = epoch


@pytest.fixture(scope="module", params=["llama", "t5"])
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_llama if request.param == "llama" else make_t5
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(model: Path) -> Pair:
    return loading.load(model)


def written(tmp_path: Path, texts: list[str] = TEXTS) -> Path:
    file = tmp_path / "texts"
    file.write_text("\n".join(texts))
    return file


def trained(pair: Pair, tmp_path: Path, watcher: Watcher | None = None, **fitting) -> Trained:
    asked = {"heads": 2, "epochs": 2, "batch": 16, **fitting}
    return train(
        pair,
        written(tmp_path),
        tmp_path / "heads",
        DataConfig(length=48),
        HeadsConfig(**asked),
        watcher or Watcher(),
    )


def test_what_is_written_loads_with_its_base(pair: Pair, tmp_path: Path) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert watcher.samples == [0, 1, 2, 3, 4]
    assert watcher.steps[-1] == 2 * watcher.steps[-1] // watcher.epochs
    assert done.outcome.epochs == watcher.epochs == 2
    assert not done.resumed
    config = json.loads((done.output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert os.path.samefile(done.output / config["base_model_name_or_path"], pair.name)
    loaded = loading.load(done.output)
    asked = {"max_tokens": 10}
    plain = generate(pair, "some words", Options(**asked))
    result = generate(loaded, "some words", Options(**asked))
    assert (result.tokens, result.labels.proposer) == (plain.tokens, "auto")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("own_output", [True, False])
def test_the_layout_is_the_published_one(own_output: bool, pair: Pair, tmp_path: Path) -> None:
    done = trained(pair, tmp_path, own_output=own_output, epochs=1)
    names = set(mx.load(str(done.output / "medusa_lm_head.safetensors")))
    own = {"0.1.weight", "1.1.weight"} if own_output else set()
    assert names == own | {
        f"{head}.0.linear.{part}" for head in range(2) for part in ("weight", "bias")
    }


def rows_of(
    pair: Pair, tmp_path: Path, samples: list[Sample], **settings
) -> tuple[Rows, list[list[int]]]:
    tmp_path.mkdir(exist_ok=True)
    rows = Rows(tmp_path, pair.target.width, pair.target.state_dtype)
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
        [Sample(text) for text in TEXTS[:3]],
        length=48,
        temperatures=(0.0,),
    )
    every = rows.states(np.arange(int(rows.lengths.sum())))
    best = mx.argmax(pair.target.head(every[None])[0], axis=-1).tolist()
    assert best == [token for text in found for token in text]
    for prompt, text in zip(prompts, found, strict=True):
        again = generate(pair, prompt, Options(max_tokens=len(text), regular=True))
        assert list(again.tokens) == text


def test_the_models_own_texts_are_drawn_where_a_temperature_is_given(
    pair: Pair, tmp_path: Path
) -> None:
    samples = [Sample("some words"), Sample("some words")]
    _, cold = rows_of(pair, tmp_path / "cold", samples, length=48, temperatures=(0.0,))
    _, warm = rows_of(pair, tmp_path / "warm", samples, length=48, temperatures=(1.0,))
    _, again = rows_of(pair, tmp_path / "again", samples, length=48, temperatures=(1.0,))
    assert cold[0] == cold[1]
    assert warm[0] != warm[1]
    assert warm == again


def test_as_many_texts_are_written_at_each_temperature(pair: Pair, tmp_path: Path) -> None:
    samples = [Sample("some words")] * 6
    _, cold = rows_of(pair, tmp_path / "cold", samples[:2], length=48, temperatures=(0.0,))
    _, mixed = rows_of(pair, tmp_path / "mixed", samples, length=48, temperatures=(0.0, 0.7, 1.0))
    assert mixed.count(cold[0]) == 2
    assert len({tuple(text) for text in mixed}) == 5


def test_without_self_distillation_the_data_is_learned(pair: Pair, tmp_path: Path) -> None:
    samples = [Sample("some words", "and more words"), Sample("other", "some words")]
    _, found = rows_of(pair, tmp_path, samples, length=100, self_distill=False)
    assert found == [pair.tokenizer.encode(sample.target) for sample in samples]


def test_texts_without_targets_are_cut_for_a_completer(tmp_path: Path) -> None:
    pair = loading.load(make_llama(tmp_path))
    text = " ".join(TEXTS)
    ids = pair.tokenizer.encode(text)
    _, found = rows_of(pair, tmp_path / "rows", [Sample(text)], length=8, self_distill=False)
    expected = [ids[start + 1 : start + 8] for start in range(0, len(ids), 8)]
    assert found == [part for part in expected if len(part) > 1]


@pytest.fixture(scope="module")
def uninterrupted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(pair, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stop", [{"samples": 2}, {"steps": 1}, {"steps": 3}])
def test_an_interrupted_training_goes_on_and_writes_the_same(
    stop: dict, pair: Pair, uninterrupted: Trained, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(**stop))
    assert not (tmp_path / "heads").exists(), "nothing half-written"
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert done.resumed
    assert watcher.samples[0] == stop.get("samples", len(TEXTS))
    assert done.outcome == uninterrupted.outcome
    found, right = (
        mx.load(str(each.output / "medusa_lm_head.safetensors")) for each in (done, uninterrupted)
    )
    assert all(mx.allclose(found[name], right[name], atol=1e-3) for name in right)


def test_other_settings_of_the_fit_use_the_same_states(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(steps=1))
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher, learning_rate=0.01)
    assert (watcher.samples, watcher.steps[0]) == ([len(TEXTS)], 1)
    assert done.resumed


def test_other_data_begin_anew(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(samples=2))
    work = tmp_path / ".heads.training"
    assert work.is_dir()
    file = written(tmp_path, [*TEXTS, "one more"])
    watcher = Watcher()
    asked = DataConfig(length=48), HeadsConfig(heads=1, epochs=1)
    done = train(pair, file, tmp_path / "heads", *asked, watcher)
    assert watcher.samples == [0, 1, 2, 3, 4, 5]
    assert not done.resumed


def test_other_weights_under_the_same_name_begin_anew(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path, Watcher(steps=1))
    again = loading.load(pair.name)
    network = again.target.network
    network.update(tree_map(lambda array: 1.1 * array, network.parameters()))
    assert not trained(again, tmp_path).resumed


def test_data_without_use_is_refused_and_nothing_is_written(pair: Pair, tmp_path: Path) -> None:
    file = written(tmp_path, ["only one"])
    with pytest.raises(PromptError, match="fewer than two texts"):
        train(pair, file, tmp_path / "heads", DataConfig(), HeadsConfig(), Watcher())
    assert not (tmp_path / "heads").exists()


def test_a_translator_needs_targets_without_self_distillation(tmp_path: Path) -> None:
    pair = loading.load(make_t5(tmp_path))
    with pytest.raises(PromptError, match='with "target"'):
        rows_of(pair, tmp_path / "rows", [Sample(text) for text in TEXTS], self_distill=False)


def test_an_output_that_exists_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    with pytest.raises(OutputError, match="heads exists: delete it, or choose another --output"):
        trained(pair, tmp_path)


def test_heads_are_no_base_for_heads(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    make_llama(tmp_path / "base")
    pair = loading.load(heads.write(tmp_path / "given", "../base"))
    with pytest.raises(OptionError, match="already: give the base"):
        trained(pair, tmp_path)


def test_a_name_of_the_hub_stays_a_name(tmp_path: Path) -> None:
    assert medusa._base_name("someone/model", tmp_path) == "someone/model"


@pytest.mark.parametrize(
    ("kind", "asked", "match"),
    [
        (DataConfig, {"samples": 1}, "samples must be 2 or more"),
        (DataConfig, {"length": 7}, "length must be 8"),
        (DataConfig, {"temperatures": (0.0, -1)}, "temperature must be 0 or more, not -1"),
        (DataConfig, {"temperatures": ()}, "temperature needs one number or more"),
        (HeadsConfig, {"heads": 0}, "heads must be 1 to 16"),
        (HeadsConfig, {"heads": 17}, "heads must be 1 to 16"),
        (HeadsConfig, {"batch": 0}, "batch"),
        (HeadsConfig, {"epochs": 0}, "epochs"),
        (HeadsConfig, {"patience": 0}, "patience"),
        (HeadsConfig, {"learning_rate": 0}, "learning-rate"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, asked: dict, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        kind(**asked)
