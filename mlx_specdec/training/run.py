"""What all trainings share: texts and their hidden states, a fit, and a directory to resume from.

The directory is hidden and lies beside the output. A later run with the same settings resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..checkpoints import destination
from ..engine.pair import Pair
from ..engine.prompt_cache_files import fingerprint
from ..errors import OutputError
from ..interfaces import Progress
from .collect import Rows, collect, read_samples
from .config import DataConfig, TrainConfig
from .fit import Fit, Measured, Outcome, Step, Task


@dataclass(frozen=True)
class Watcher:
    """Receives the progress. collected: texts that have their hidden states. measured: figures of
    each epoch; epoch 0 is the start."""

    collected: Progress
    stepped: Step
    measured: Measured


@dataclass(frozen=True)
class Trained:
    """The report of a training. start: figures of its start on the same held-out texts; None where
    they mean nothing. rows, held_out: tokens that were learned from, and that were not. seconds: of
    this run alone. resumed: an earlier run had left its texts, and maybe a checkpoint."""

    output: Path
    start: Any
    outcome: Outcome
    rows: int
    held_out: int
    seconds: float
    resumed: bool


class Training:
    """Texts with the target's hidden states, in `directory`, and the fit to them.

    prompts: those of the rows' samples. taps: see `collect`. Raises PromptError
    for data with nothing usable.
    """

    def __init__(
        self,
        pair: Pair,
        file: Path,
        directory: Path,
        config: DataConfig,
        watcher: Watcher,
        taps: Sequence[str] = (),
    ) -> None:
        self._started = time.perf_counter()
        self._directory = directory
        self._watcher = watcher
        self._data = config
        samples = read_samples(file, config.seed)
        self.digest = hashlib.sha256(file.read_bytes()).hexdigest()
        model = {
            "model": pair.name,
            "weights": fingerprint(pair.target.network),
            "tokenizer": pair.tokenizer.digest,
            "prefix": pair.task_prefix,
            "bytes": pair.target.nbytes,
            "dtype": pair.dtype,
        }
        learned = {"data": asdict(config), "taps": list(taps)}
        self._settings = {**model, "digest": self.digest, **learned}
        self._resumed = _keep(directory / "rows", self._settings)
        width = pair.target.width * (len(taps) + 1)
        self.rows = Rows(directory / "rows", width, pair.target.state_dtype)
        self.prompts = collect(pair, samples, config, self.rows, watcher.collected, taps)

    def fit(
        self,
        task: Task,
        config: TrainConfig,
        start: Any = None,
        origin: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Train to the end. start: see Fit. origin: tells this start from others."""
        directory = self._directory / "fit"
        _keep(directory, {**self._settings, "fit": asdict(config), "origin": origin})
        fit = Fit(task, config, directory / "checkpoint.safetensors", start)
        return fit.run(self._watcher.stepped, self._watcher.measured)

    def improve(
        self,
        task: Task,
        config: TrainConfig,
        output: Path,
        origin: Mapping[str, str],
        write: Callable[[Path, Mapping[str, Any]], None],
    ) -> Trained:
        """Train a task whose start may already be its best, and write the result, rounded as it is
        stored. origin: tells this start from others. write: writes all files to a directory, with
        facts about the training."""
        start = task.evaluate()
        self._watcher.measured(0, start)
        outcome = self.fit(task, config, start, origin)
        round_as_stored(task.module)
        outcome = replace(outcome, figures=task.evaluate())
        facts = {
            **origin,
            "texts": asdict(self._data),
            "training": asdict(config),
            "epochs": outcome.epochs,
            "best_epoch": outcome.best,
            "held_out": {"start": asdict(start), "result": asdict(outcome.figures)},
        }
        with destination.directory(output) as made:
            write(made, facts)
        return self.trained(output, task, outcome, start)

    def trained(self, output: Path, task: Task, outcome: Outcome, start: Any = None) -> Trained:
        """Return the report of the training."""
        rows, held_out = task.count(task.train), task.count(task.held_out)
        seconds = time.perf_counter() - self._started
        return Trained(output, start, outcome, rows, held_out, seconds, self._resumed)


STORED = mx.bfloat16


def round_as_stored(network: nn.Module) -> None:
    """Round every weight to what will be read again; all stay float32."""

    def rounded(path: str, array: mx.array) -> mx.array:
        return array.astype(stored_type(network, path, array)).astype(array.dtype)

    network.update(tree_map_with_path(rounded, network.parameters()))
    mx.eval(network.parameters())


def stored_type(network: nn.Module, name: str, array: mx.array) -> mx.Dtype:
    """Return half precision, except for weights that the model keeps as they are."""
    may = getattr(network, "cast_predicate", lambda _: True)
    return STORED if may(name) and mx.issubdtype(array.dtype, mx.floating) else array.dtype


@contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """Enter the hidden directory; it is removed when the block ends well, and stays otherwise.

    Raises OutputError where `output` exists or has a name that MLX cannot write to, and for
    anything the system refuses in the block.
    """
    try:
        str(output).encode("utf-8")
    except UnicodeError:  # MLX writes to no other path
        raise OutputError(f"{str(output)!a} is not UTF-8: choose another --output") from None
    if os.path.lexists(output):
        raise OutputError(f"{output} exists: delete it, or choose another --output")
    work = output.with_name(f".{output.name}.training")
    try:
        yield work
        shutil.rmtree(work, ignore_errors=True)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise OutputError(
            f"{output} cannot be trained: {reason}: choose another --output"
        ) from None


def _keep(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Make the directory, or empty it unless it was made for the same settings; return whether it
    was."""
    note = directory / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    note.write_text(text, encoding="utf-8")
    return False
