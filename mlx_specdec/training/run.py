"""What all trainings share: texts and their hidden states, a fit, and a directory to resume from.

The directory is hidden and lies beside the output. A later run with the same settings resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.pair import Pair
from ..engine.prompt_cache_files import fingerprint
from ..errors import OutputError
from ..interfaces import Progress
from .collect import Rows, collect, read_samples
from .config import DataConfig, TrainConfig
from .fit import Fit, Measured, Outcome, Step, Task


@dataclass(frozen=True)
class Watcher:
    """Who is told how far the work is. collected: of texts that have their hidden states. measured:
    epoch 0 is the start."""

    collected: Progress
    stepped: Step
    measured: Measured


@dataclass(frozen=True)
class Trained:
    """start: of what was begun with, on the same held-out texts; None where it says nothing. rows,
    held_out: tokens that were learned from, and that were not. seconds: of this run alone; resumed:
    whether an earlier one had left its texts, and maybe a training of the same settings."""

    output: Path
    start: Any
    outcome: Outcome
    rows: int
    held_out: int
    seconds: float
    resumed: bool


class Training:
    """Texts with the target's hidden states, in `directory`, and what is fitted to them.

    prompts: what stands before each of the rows' samples. taps: see `collect`. Raises PromptError
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

    def trained(self, output: Path, task: Task, outcome: Outcome, start: Any = None) -> Trained:
        """What to tell of it."""
        rows, held_out = task.count(task.train), task.count(task.held_out)
        seconds = time.perf_counter() - self._started
        return Trained(output, start, outcome, rows, held_out, seconds, self._resumed)


def facts(
    origin: Mapping[str, Any], data: DataConfig, config: TrainConfig, start: Any, outcome: Outcome
) -> dict[str, Any]:
    """What a directory of weights says of how they were trained. start: of what was begun with, on
    the held-out texts; origin: what that was."""
    return {
        **origin,
        "texts": asdict(data),
        "training": asdict(config),
        "epochs": outcome.epochs,
        "best_epoch": outcome.best,
        "held_out": {"start": asdict(start), "result": asdict(outcome.figures)},
    }


@contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """The hidden directory; it is removed when the block ends well, and stays otherwise.

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
    """Makes the directory; empties it unless it was made for the same settings. Whether it was."""
    note = directory / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    note.write_text(text, encoding="utf-8")
    return False
