"""Drafts in training equal drafts in decoding."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_specdec.engine import loading
from mlx_specdec.engine.pair import Pair
from mlx_specdec.training import drafter as drafter_files
from mlx_specdec.training.anchors import Anchored, DSparkTask
from mlx_specdec.training.collect import SampleFiles, collect
from mlx_specdec.training.config import DataConfig, DrafterConfig
from mlx_specdec.types import after

from ..support.models import make_llama, make_t5

MAKE = {"llama": make_llama, "t5": make_t5}
SAMPLES = [(" ".join(["some words and more"] * count), "") for count in (3, 1, 2, 1, 4, 2, 1)]
COLLECTING = DataConfig(length=24, texts_at_once=4)
SLOTS = 3


class Learned:
    """Texts of a tiny target with its hidden states."""

    def __init__(self, pair: Pair, directory: Path) -> None:
        self.pair = pair
        hidden = tuple(map(after, drafter_files.hidden_layers(pair.target.layers)))
        self.rows = SampleFiles(
            directory, pair.target.width * (len(hidden) + 1), pair.target.state_dtype
        )
        ignore = lambda done, total: None  # noqa: E731
        self.prompts = collect(pair, SAMPLES, COLLECTING, self.rows, ignore, hidden)
        self.leads = [len(pair.target.prefix(prompt)) - 1 for prompt in self.prompts]

    def encoded(self, sample: int) -> mx.array | None:
        """Return the encoder's output of a sample's source."""
        context = self.pair.target.open_batch([self.prompts[sample]])
        encoded = context.advance(mx.array([[0]])).encoded
        return encoded[0] if encoded else None


@pytest.fixture(scope="module", params=MAKE)
def learned(request, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    pair = loading.load(MAKE[request.param](tmp_path_factory.mktemp("model")))
    return Learned(pair, tmp_path_factory.mktemp("rows"))


def task_of(learned: Learned, directory: Path) -> DSparkTask:
    """A task whose drafter says much, since nothing of it is as it began."""
    pair, config = learned.pair, DrafterConfig(num_draft=SLOTS, batch=4)
    network, _ = drafter_files.begin(directory, pair, config, learned.rows)
    keys = iter(mx.random.split(mx.random.key(4), 100))
    moved = tree_map(
        lambda array: array + 0.2 * mx.random.normal(array.shape, key=next(keys)),
        network.parameters(),
    )
    network.update(moved)
    return DSparkTask(network, learned, config)


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
        context = network.open()
        if (encoded := learned.encoded(sample)) is not None:
            context.attend([encoded])
        context.add(hidden, [length])
        logits = context.first_logits(tokens[None, first : first + length].tolist(), SLOTS)
        for at in range(slot):
            logits = context.next_logits(mx.array(tokens[None, None, first + length + at]))
        expected = logits[0, 0, : drafted.shape[1]]
        assert mx.allclose(drafted[row], expected, atol=2e-4, rtol=1e-4), (sample, length, slot)
        checked += slot > 0
    assert checked > 3
