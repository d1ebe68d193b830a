"""From texts to the directory of a drafter on hidden states."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.interfaces import after
from mlx_specdec.models.drafters import kinds as speculators
from mlx_specdec.options import Options
from mlx_specdec.training import drafter as drafter_files
from mlx_specdec.training.anchors import Anchored, AnchorTask
from mlx_specdec.training.collect import SampleFiles, TrainingSample, collect
from mlx_specdec.training.config import DataConfig, DrafterConfig
from mlx_specdec.training.drafter import TASKS

from ..support import trainings
from ..support.models import make_llama, make_t5
from ..support.trainings import Watcher, weights

trained = functools.partial(trainings.trained, "dspark")
MAKE = {"llama": make_llama, "t5": make_t5}


@pytest.fixture(scope="module", params=MAKE)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(model: Path) -> Pair:
    return loading.load(model)


@pytest.mark.parametrize("kind", TASKS)
def test_a_drafter_is_trained_and_drafts(
    kind: str, pair: Pair, model: Path, tmp_path: Path
) -> None:
    watcher = Watcher()
    done = trainings.trained(kind, pair, tmp_path, watcher)
    assert done.outcome.best > 0
    assert done.outcome.figures.loss < done.start.loss
    assert sum(done.outcome.figures.tokens) > sum(done.start.tokens) + 0.1
    assert watcher.epochs[0] == (0, done.start)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    loaded = loading.load(model, done.output)
    assert loaded.drafter_network is not None and loaded.drafter_network.kind == kind
    accepted = 0
    for temperature in (0.0, 1.0):
        settings = {"max_tokens": 20, "temperature": temperature, "seed": 3}
        plain = generate(pair, "some words", Options(regular=True, **settings))
        result = generate(loaded, "some words", Options(num_draft=3, **settings))
        assert result.tokens == plain.tokens
        assert result.stats.drafted > 0
        accepted += result.stats.accepted
    assert accepted > 0
    report = json.loads((done.output / "provenance.json").read_text())
    assert report["held_out"]["result"]["greedy"] == list(done.outcome.figures.greedy)
    assert report["best_epoch"] == done.outcome.best
    assert report["files"].keys() >= {"model.safetensors", "config.json"}
    assert str(model.parent) not in json.dumps(report)


def test_a_dspark_is_written_as_the_package_speculators_has_it(pair: Pair, tmp_path: Path) -> None:
    done = trained(pair, tmp_path, epochs=1, layers=2)
    config = json.loads((done.output / "config.json").read_text())
    fixture = Path(__file__).parents[1] / "fixtures" / "drafters" / "dspark-rnn"
    reference = json.loads((fixture / "config.json").read_text())
    extra = {"auto_map", "target_hidden_size", "transformers_version", "sliding_window_non_causal"}
    assert reference.keys() - config.keys() <= extra
    stored = mx.load(str(fixture / "model.safetensors"))
    # Attending to an encoder is this package's own.
    names = {name for name in weights(done.output) if "encoder_" not in name}
    one_layer = {name for name in names if not name.startswith("layers.1.")}
    assert one_layer == stored.keys() - {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}
    assert config["aux_hidden_state_layer_ids"] == [1], "layers by their inputs"
    assert {array.dtype for array in weights(done.output).values()} == {mx.bfloat16}
    files = speculators.read(done.output)
    assert files is not None and files.tapped == (0,)


def test_an_eagle3_is_written_as_its_authors_have_it(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_files, "MOST_OWN_TOKENS", 20)
    done = trainings.trained("eagle3", pair, tmp_path, epochs=1)
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


def test_an_eagle3_drafts_the_tokens_that_make_up_nearly_all_of_the_data(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_files, "OWN_STEP", 4)
    width = pair.target.width
    rows = SampleFiles(tmp_path, 2 * width, mx.float32)
    tokens = [*range(6)] * 163 + [7] * 12 + [8] * 10
    rows.append(tokens, mx.zeros((len(tokens), 2 * width)))
    texts = drafter_files.TextStatistics.of(rows, width, pair.vocabulary)
    assert texts.common == 7
    begun = drafter_files.begin(tmp_path / "new", pair, DrafterConfig(kind="eagle3"), texts)
    assert begun.config["draft_vocab_size"] == 8
    assert begun.network.target_ids == (0, 1, 2, 3, 4, 5, 7, 8)


# Drafts in training equal drafts in decoding


SAMPLES = [
    TrainingSample(" ".join(["some words and more"] * count)) for count in (3, 1, 2, 1, 4, 2, 1)
]
COLLECTING = DataConfig(length=24, texts_at_once=4)
SLOTS = 3


class Learned:
    """Texts of a tiny target with its hidden states."""

    def __init__(self, pair: Pair, directory: Path) -> None:
        self.pair = pair
        taps = tuple(map(after, drafter_files.tapped(pair.target.layers)))
        self.rows = SampleFiles(
            directory, pair.target.width * (len(taps) + 1), pair.target.state_dtype
        )
        ignore = lambda done, total: None  # noqa: E731
        self.prompts = collect(pair, SAMPLES, COLLECTING, self.rows, ignore, taps)
        self.leads = [len(pair.target.prefix(prompt)) - 1 for prompt in self.prompts]

    def encoded(self, sample: int) -> mx.array | None:
        """Return the encoder's output of a sample's source."""
        context = self.pair.target.open(self.prompts[sample])
        encoded = context.advance(mx.array([[0]])).encoded
        return encoded[0] if encoded else None


@pytest.fixture(scope="module", params=MAKE)
def learned(request, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    pair = loading.load(MAKE[request.param](tmp_path_factory.mktemp("model")))
    return Learned(pair, tmp_path_factory.mktemp("rows"))


def task_of(learned: Learned, directory: Path, kind: str, **settings: object) -> AnchorTask:
    """A task whose drafter says much, since nothing of it is as it began."""
    pair, config = learned.pair, DrafterConfig(kind=kind, num_draft=SLOTS, batch=4, **settings)
    texts = drafter_files.TextStatistics.of(learned.rows, pair.target.width, pair.vocabulary)
    begun = drafter_files.begin(directory / kind, pair, config, texts)
    keys = iter(mx.random.split(mx.random.key(4), 100))
    moved = tree_map(
        lambda array: array + 0.2 * mx.random.normal(array.shape, key=next(keys)),
        begun.network.parameters(),
    )
    begun.network.update(moved)
    return TASKS[kind](begun.network, learned, config)


def places(task: AnchorTask, anchored: Anchored, examples: np.ndarray) -> Iterator[tuple[int, ...]]:
    """(sample, rows that may be looked at, slot) of all that is wanted."""
    shape = anchored.tokens.shape
    for place in anchored.wanted.tolist():
        text, anchor, slot = np.unravel_index(place, shape)
        yield int(examples[text]), int(anchored.anchors[int(text), int(anchor)]), int(slot)


@pytest.mark.parametrize("kind", TASKS)
def test_the_task_drafts_what_the_drafter_drafts(
    kind: str, learned: Learned, tmp_path: Path
) -> None:
    task = task_of(learned, tmp_path, kind)
    examples = task.train[:2]
    batch = task.take(examples, np.random.default_rng(1))
    anchored = Anchored(*batch)
    drafted = task.draft(anchored)
    network, rows = task.network, learned.rows
    tokens, width = rows.tokens(), learned.pair.target.width
    checked = 0
    for row, (sample, length, slot) in enumerate(places(task, anchored, examples)):
        first = int(rows.starts[sample])
        hidden = rows.states(np.arange(first, first + length))[None, :, :-width]
        reading = network.open()
        if (encoded := learned.encoded(sample)) is not None:
            reading.attend(encoded)
        reading.read(hidden, mx.array(tokens[None, first : first + length]))
        logits = reading.guess(SLOTS)
        for at in range(slot):
            logits = reading.guess_after(mx.array(tokens[None, None, first + length + at]))
        ids = network.target_ids
        expected = logits[0, 0, : drafted.shape[1]] if ids is None else logits[0, 0, mx.array(ids)]
        assert mx.allclose(drafted[row], expected, atol=2e-4, rtol=1e-4), (sample, length, slot)
        checked += slot > 0
    assert checked > 3
