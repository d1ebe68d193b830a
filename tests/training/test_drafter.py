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
from mlx_specdec.training.anchors import Anchored, DSparkTask
from mlx_specdec.training.collect import SampleFiles, TrainingSample, collect
from mlx_specdec.training.config import DataConfig, DrafterConfig

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


def test_a_drafter_is_trained_and_drafts(pair: Pair, model: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    done = trained(pair, tmp_path, watcher)
    assert done.outcome.best > 0
    assert done.outcome.figures.loss < done.start.loss
    assert sum(done.outcome.figures.tokens) > sum(done.start.tokens) + 0.1
    assert watcher.epochs[0] == (0, done.start)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    loaded = loading.load(model, done.output)
    assert loaded.drafter_network is not None and loaded.drafter_network.kind == "dspark"
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


def task_of(learned: Learned, directory: Path) -> DSparkTask:
    """A task whose drafter says much, since nothing of it is as it began."""
    pair, config = learned.pair, DrafterConfig(num_draft=SLOTS, batch=4)
    texts = drafter_files.TextStatistics.of(learned.rows, pair.target.width, pair.vocabulary)
    begun = drafter_files.begin(directory, pair, config, texts)
    keys = iter(mx.random.split(mx.random.key(4), 100))
    moved = tree_map(
        lambda array: array + 0.2 * mx.random.normal(array.shape, key=next(keys)),
        begun.network.parameters(),
    )
    begun.network.update(moved)
    return DSparkTask(begun.network, learned, config)


def places(task: DSparkTask, anchored: Anchored, examples: np.ndarray) -> Iterator[tuple[int, ...]]:
    """(sample, rows that may be looked at, slot) of all that is wanted."""
    shape = anchored.tokens.shape
    for place in anchored.wanted.tolist():
        text, anchor, slot = np.unravel_index(place, shape)
        yield int(examples[text]), int(anchored.anchors[int(text), int(anchor)]), int(slot)


def test_the_task_drafts_what_the_drafter_drafts(learned: Learned, tmp_path: Path) -> None:
    task = task_of(learned, tmp_path)
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
        expected = logits[0, 0, : drafted.shape[1]]
        assert mx.allclose(drafted[row], expected, atol=2e-4, rtol=1e-4), (sample, length, slot)
        checked += slot > 0
    assert checked > 3
