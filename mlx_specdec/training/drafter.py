"""train-draft of the kinds that read hidden states, from beginning to end: a target and a file of
texts -> a drafter's directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ..assemble import Pair
from ..checkpoints.disk import destination
from ..contracts import after
from ..errors import OptionError
from . import drafter_files
from .anchors import AnchorTask
from .config import DataConfig, DrafterConfig
from .draft_files import round_as_stored, short_name
from .dspark_task import DSparkTask
from .eagle3_task import Eagle3Task
from .run import Trained, Training, Watcher, facts, work_directory

TASKS: Mapping[str, Callable[..., AnchorTask]] = {"dspark": DSparkTask, "eagle3": Eagle3Task}


def train(
    pair: Pair,
    file: Path,
    output: Path,
    data: DataConfig,
    config: DrafterConfig,
    watcher: Watcher,
) -> Trained:
    """Train a drafter for `pair`'s target and write it as a directory that loads with it.

    pair: as assemble.load gives it, without a draft. The target's hidden states of all texts are
    kept on disk beside `output` until the end: they never change, and a pass of the target would
    take a third of every step. Raises PromptError for data with nothing usable, OptionError for a
    target that shows no hidden states, OutputError where `output` exists or cannot be written.
    """
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    with work_directory(output) as directory:
        target = pair.target
        taps = tuple(map(after, drafter_files.tapped(target.layers)))
        # A target that does not show or lend what is needed says so before any text is written.
        tokens = mx.zeros((1, 1), dtype=mx.int32)
        target.open([0]).advance(tokens, taps=taps)
        target.embed(tokens)
        training = Training(pair, file, directory, data, watcher, taps)
        texts = drafter_files.Texts.of(training.rows, target.width, pair.vocabulary)
        begun = drafter_files.begin(directory / "start", pair, config, texts)
        known = training.rows, training.prompts
        task = TASKS[config.kind](begun.network, target, *known, pair.vocabulary, config)
        start = task.evaluate()
        watcher.measured(0, start)
        origin = {"target": short_name(pair.name), "data_digest": training.digest}
        outcome = training.fit(task, config, start, origin)
        round_as_stored(task.module)
        outcome = replace(outcome, figures=task.evaluate())
        told = facts(origin, data, config, start, outcome)
        with destination.directory(output) as made:
            drafter_files.write(made, begun, told)
    return training.trained(output, task, outcome, start)
