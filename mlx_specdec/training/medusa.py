"""train-medusa from beginning to end: a model and a file of texts -> a directory of heads.

Knows the order of the work, and where its parts are kept until it is done: beside the output, in a
hidden directory that a later run with the same settings goes on from.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx

from ..assemble import Pair
from ..checkpoints import destination
from ..checkpoints.medusa_files import BASE, COUNT, LAYERS, SAFETENSORS
from ..errors import OptionError, OutputError
from ..models.base import Base
from ..models.medusa_heads import MedusaHeads
from . import data
from .collect import collect
from .fit import Fit, Outcome
from .head_task import HeadTask
from .new_heads import Accuracy, fresh
from .rows import Rows
from .settings import Collecting, Fitting


class Watcher(Protocol):
    """Who is told how far the work is."""

    def collected(self, done: int, total: int) -> None:
        """So many samples have their hidden states."""
        ...

    def stepped(self, done: int, total: int, loss: float) -> None:
        """A step of the training was made."""
        ...

    def measured(self, epoch: int, accuracy: Accuracy) -> None:
        """An epoch has ended, with this accuracy on held-out texts."""
        ...


@dataclass(frozen=True)
class Trained:
    """rows, held_out: hidden states that were learned from, and that were not. seconds: of this run
    alone; resumed: whether an earlier one had begun it."""

    output: Path
    outcome: Outcome[Accuracy]
    rows: int
    held_out: int
    seconds: float
    resumed: bool


def train(
    pair: Pair,
    file: Path,
    output: Path,
    collecting: Collecting,
    fitting: Fitting,
    watcher: Watcher,
) -> Trained:
    """Train heads for `pair`'s target and write them as a directory that loads with it.

    pair: as assemble.load gives it. Raises PromptError for data with nothing usable, OptionError
    for a model that is heads, OutputError where `output` exists or cannot be written.
    """
    started = time.perf_counter()
    if os.path.lexists(output):
        raise OutputError(f"{output} exists: delete it, or choose another --output")
    if pair.heads is not None:
        raise OptionError(
            f"{pair.name} is Medusa heads already: give the base model that they name"
        )
    base = cast(Base, pair.target)  # what assemble.load loads is one
    samples = data.read_samples(file, collecting.seed)
    work = output.with_name(f".{output.name}.training")
    try:
        known = {"model": pair.name, "bytes": pair.target.nbytes, "dtype": pair.dtype}
        known |= {"data": data.digest(file), **asdict(collecting)}
        resumed = _kept(work / "rows", known)
        rows = Rows(work / "rows", base.width, base.state_dtype)
        collect(pair, samples, collecting, rows, watcher.collected)
        _kept(work / "fit", {**known, **{f"fit {k}": v for k, v in asdict(fitting).items()}})
        heads = fresh(base, fitting.heads, fitting.layers, own_output=fitting.own_output)
        task = HeadTask(heads, rows, fitting.batch, fitting.seed)
        fit = Fit(task, fitting, work / "fit" / "checkpoint.safetensors")
        outcome = fit.run(watcher.stepped, watcher.measured)
        with destination.directory(output) as directory:
            write(directory, heads, _base_name(pair.name, output))
        shutil.rmtree(work, ignore_errors=True)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise OutputError(
            f"{output} cannot be trained: {reason}: choose another --output"
        ) from None
    seconds = time.perf_counter() - started
    return Trained(output, outcome, task.rows, task.held_out, seconds, resumed)


def write(directory: Path, heads: MedusaHeads, base: str) -> None:
    """config.json and the heads in bfloat16, in the layout that text-generation-inference loads."""
    tensors = {name: array.astype(mx.bfloat16) for name, array in heads.tensors().items()}
    shapes = next(iter(tensors.values())).shape
    config = {
        BASE: base,
        COUNT: heads.count,
        LAYERS: len(heads.weights),
        "hidden_size": shapes[-1],
        "vocab_size": heads.vocabulary,
    }
    mx.save_safetensors(str(directory / SAFETENSORS), tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _kept(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Makes the directory; empties it unless it was made for the same settings. Whether it was."""
    note = directory / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    note.write_text(text, encoding="utf-8")
    return False


def _base_name(name: str, output: Path) -> str:
    """What config.json calls the base: a Hub name as it is, a directory seen from `output`."""
    path = os.path.expanduser(name)
    return os.path.relpath(path, output) if os.path.isdir(path) else name
