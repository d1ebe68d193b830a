"""train-draft from beginning to end: a target and a file of texts -> a draft model's directory.

Knows the order of the work; `work` knows where its parts are kept until it is done.
Source: DistillSpec (Zhou et al., arXiv 2310.08461).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..assemble import Pair
from ..checkpoints.disk import destination
from ..checkpoints.disk.digests import Digests, combined
from ..checkpoints.files import Weights
from ..models.trainable import trainable
from . import data, draft_files, work
from .beginnings import Beginning, begin, name_of
from .collect import collect, prompts
from .divergence import Closeness
from .draft_task import DraftTask
from .fit import Fit, Outcome
from .rows import Rows
from .settings import Collecting, Distilling, Shape


class Watcher(Protocol):
    """Who is told how far the work is."""

    def collected(self, done: int, total: int) -> None:
        """So many texts have the target's hidden states."""
        ...

    def stepped(self, done: int, total: int, loss: float) -> None:
        """A step of the training was made."""
        ...

    def measured(self, epoch: int, closeness: Closeness) -> None:
        """An epoch has ended, with this on held-out texts; epoch 0 is the start."""
        ...


@dataclass(frozen=True)
class Trained:
    """start: of the draft that was begun with; outcome: of the one that was written, on the same
    held-out texts. rows, held_out: tokens that were learned from, and that were not. seconds: of
    this run alone; resumed: whether an earlier one had begun it."""

    output: Path
    start: Closeness
    outcome: Outcome[Closeness]
    rows: int
    held_out: int
    seconds: float
    resumed: bool

    @property
    def gained(self) -> bool:
        """Whether anything is better than the start."""
        return self.outcome.best > 0


def train(
    pair: Pair,
    file: Path,
    output: Path,
    shape: Shape | None,
    collecting: Collecting,
    distilling: Distilling,
    watcher: Watcher,
) -> Trained:
    """Train a draft for `pair`'s target and write it as a directory that loads.

    pair: as assemble.load gives it; its draft is what is begun with, unless there is a shape.
    The best draft on held-out texts is written, and that may be the start. Raises PromptError for
    data with nothing usable, OptionError and VocabularyError for models that cannot be trained so,
    OutputError where `output` exists or cannot be written.
    """
    started = time.perf_counter()
    with work.place(output) as directory, begin(pair, shape, distilling.seed) as beginning:
        base = pair.target
        samples = data.read_samples(file, collecting.seed)
        student = trainable(beginning.model)
        known = {"model": pair.name, "bytes": pair.target.nbytes, "dtype": pair.dtype}
        known |= {"data": data.digest(file), **asdict(collecting)}
        resumed = work.kept(directory / "rows", known)
        rows = Rows(directory / "rows", base.width, base.state_dtype)
        collect(pair, samples, collecting, rows, watcher.collected)
        origin = _origin(pair, file, beginning)
        known |= {f"fit {name}": value for name, value in asdict(distilling).items()}
        work.kept(directory / "fit", {**known, **origin})
        before = prompts(pair, samples, collecting)
        task = DraftTask(student, base, rows, before, pair.vocabulary, distilling)
        start = task.judge()
        watcher.measured(0, start)
        checkpoint = directory / "fit" / "checkpoint.safetensors"
        fit = Fit(task, distilling, checkpoint, start)
        outcome = fit.run(watcher.stepped, watcher.measured)
        draft_files.round_as_stored(student.network)
        outcome = Outcome(task.judge(), outcome.best, outcome.epochs)
        facts = {
            **origin,
            "texts": asdict(collecting),
            "training": asdict(distilling),
            "epochs": outcome.epochs,
            "best_epoch": outcome.best,
            "held_out": {"start": asdict(start), "result": asdict(outcome.figures)},
        }
        with destination.directory(output) as made:
            draft_files.write(made, student.network, beginning, facts)
    seconds = time.perf_counter() - started
    return Trained(output, start, outcome, task.rows, task.held_out, seconds, resumed)


def _origin(pair: Pair, file: Path, beginning: Beginning) -> dict[str, str]:
    """What a draft comes from, told by names and contents."""
    weights = Weights(beginning.directory).paths
    with Digests([*weights, beginning.directory / "config.json"]) as digests:
        return {
            "target": name_of(pair.name),
            "start": beginning.words,
            "start_digest": combined(digests.result()),
            "data_digest": data.digest(file),
        }
