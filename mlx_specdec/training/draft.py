"""train-draft from beginning to end: a target and a file of texts -> a draft model's directory.

Source: DistillSpec (Zhou et al., arXiv 2310.08461).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..assemble import Pair
from ..checkpoints.disk import destination
from ..checkpoints.disk.digests import Digests, combined
from ..checkpoints.files import Weights
from ..models.trainable import trainable
from .config import DataConfig, DistillConfig, DraftConfig
from .draft_files import initial, round_as_stored, short_name, write
from .draft_task import DraftTask
from .run import Trained, Training, Watcher, facts, work_directory


def train(
    pair: Pair,
    file: Path,
    output: Path,
    asked: DraftConfig | None,
    data: DataConfig,
    config: DistillConfig,
    watcher: Watcher,
) -> Trained:
    """Train a draft for `pair`'s target and write it as a directory that loads.

    pair: as assemble.load gives it; its draft is what is begun with, unless another is asked for.
    The best draft on held-out texts is written, and that may be the start. Raises PromptError for
    data with nothing usable, OptionError and VocabularyError for models that cannot be trained so,
    OutputError where `output` exists or cannot be written.
    """
    with (
        work_directory(output) as directory,
        initial(pair, asked, config.seed) as begun,
    ):
        student = trainable(begun.model)
        training = Training(pair, file, directory, data, watcher)
        weights = [*Weights(begun.directory).paths, begun.directory / "config.json"]
        with Digests(weights) as digests:
            origin = {
                "target": short_name(pair.name),
                "start": begun.origin,
                "start_digest": combined(digests.result()),
                "data_digest": training.digest,
            }
        known = training.rows, training.prompts
        task = DraftTask(student, pair.target, *known, pair.vocabulary, config)
        start = task.evaluate()
        watcher.measured(0, start)
        outcome = training.fit(task, config, start, origin)
        round_as_stored(student.network)
        outcome = replace(outcome, figures=task.evaluate())
        told = facts(origin, data, config, start, outcome)
        with destination.directory(output) as made:
            write(made, student.network, begun, told)
    return training.trained(output, task, outcome, start)
