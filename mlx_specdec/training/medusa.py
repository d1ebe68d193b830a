"""train-medusa from beginning to end: a model and a file of texts -> a directory of heads.

Knows the order of the work; `work` knows where its parts are kept until it is done.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..assemble import Pair
from ..checkpoints.disk import destination
from ..checkpoints.formats.medusa import BASE, COUNT, LAYERS, SAFETENSORS
from ..errors import OptionError
from ..models.medusa_heads import MedusaHeads
from . import data, work
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
    with work.place(output) as directory:
        if pair.heads is not None:
            raise OptionError(
                f"{pair.name} is Medusa heads already: give the base model that they name"
            )
        base = pair.target
        samples = data.read_samples(file, collecting.seed)
        known = {"model": pair.name, "bytes": pair.target.nbytes, "dtype": pair.dtype}
        known |= {"data": data.digest(file), **asdict(collecting)}
        resumed = work.kept(directory / "rows", known)
        rows = Rows(directory / "rows", base.width, base.state_dtype)
        collect(pair, samples, collecting, rows, watcher.collected)
        known |= {f"fit {name}": value for name, value in asdict(fitting).items()}
        work.kept(directory / "fit", known)
        heads = fresh(base, fitting.heads, fitting.layers, own_output=fitting.own_output)
        task = HeadTask(heads, rows, fitting.batch, fitting.seed)
        fit = Fit(task, fitting, directory / "fit" / "checkpoint.safetensors")
        outcome = fit.run(watcher.stepped, watcher.measured)
        with destination.directory(output) as made:
            write(made, heads, _base_name(pair.name, output))
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


def _base_name(name: str, output: Path) -> str:
    """What config.json calls the base: a Hub name as it is, a directory seen from `output`."""
    path = os.path.expanduser(name)
    return os.path.relpath(path, output) if os.path.isdir(path) else name
