"""Training data, steps, evaluation, early stopping and checkpoints of all training runs. A run that
is interrupted resumes from a hidden directory next to the output. With the same settings it ends
with the same weights as without the interruption."""

import hashlib
import json
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from .. import OutputError
from ..checkpoints import destination
from ..checkpoints.formats import safetensors as safetensors_file
from ..engine.pair import Pair
from ..models.base import fingerprint
from ..text.prompts import read_prompts
from ..types import Progress
from .collect import SampleFiles, collect
from .config import TrainConfig

HELD_OUT = 0.1
"""Share of the samples that are held out for evaluation."""
SORTED_TOGETHER = 16
"""Number of batches whose examples are sorted by length together, so that a batch holds examples of
similar length and the order stays nearly random."""
WARM_UP = 0.05
"""The share of all steps in which the learning rate rises linearly. Then it falls as a cosine."""
PATIENCE = 2
"""Training ends after this many epochs without progress on held-out examples."""

Step = Callable[[int, int, float], None]
"""Called after each step with (done steps, total steps, loss of the step)."""
Write = Callable[[Path, Mapping[str, Any]], None]
"""Writes all files to a directory, with facts about the training run."""
Measured = Callable[[int, Any], None]
"""Called after each epoch with its number, from 1, and the figures of the held-out examples."""


class Task(ABC):
    """A module with its loss and its examples. The figures have a `loss`, a `score`, of which
    a lower one is better, and a `describe`, which returns the other figures in words.

    Attributes:
        train, held_out: The indices of the examples to train on, and to evaluate on. An example is
            a sample, which is a prompt with its completion.
    """

    def __init__(self, module: nn.Module, training: "Training", config: TrainConfig) -> None:
        self.module, self.config = module, config
        self._base, self._vocabulary = training.pair.target, training.pair.vocabulary
        self._rows, self._prompts = training.rows, training.prompts
        self.train, self.held_out = self._rows.split(HELD_OUT)

    @property
    def steps(self) -> int:
        """The number of batches in an epoch."""
        return -(-len(self.train) // self.config.batch)

    def evaluate(self) -> Any:
        """Return the figures of the held-out examples."""
        total = mx.array(0.0)
        for number, part in enumerate(self.cut(self.ordered(self.held_out))):
            total = total + self.sums(*self.take(part, np.random.default_rng(number)))
            mx.eval(total)
        return self.figures(total)

    def cut(self, examples: np.ndarray) -> list[np.ndarray]:
        """Split examples into batches, in their order."""
        return np.split(examples, range(self.config.batch, len(examples), self.config.batch))

    def shuffled(self, draw: np.random.Generator) -> Sequence[np.ndarray]:
        """Return an epoch's batches. Examples are in random order, and sorted by `ordered` within
        SORTED_TOGETHER batches."""
        order, reach = draw.permutation(self.train), self.config.batch * SORTED_TOGETHER
        parts = [self.ordered(order[at : at + reach]) for at in range(0, len(order), reach)]
        batches = [batch for part in parts for batch in self.cut(part)]
        return [batches[number] for number in draw.permutation(len(batches))]

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        """Sort examples so that neighbors fit into one batch."""
        return examples

    def count(self, examples: np.ndarray) -> int:
        """Count the rows of some examples."""
        return len(examples)

    @abstractmethod
    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """Return the arguments of `loss` and `sums`. chance: The generator of random choices."""

    @abstractmethod
    def loss(self, *batch: mx.array) -> mx.array:
        """Return the loss of the module, a differentiable scalar."""

    @abstractmethod
    def sums(self, *batch: mx.array) -> mx.array:
        """Return what `evaluate` adds up over all batches, an array of one fixed shape."""

    @abstractmethod
    def figures(self, total: mx.array) -> Any:
        """Return the figures of the total of `sums`."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks that report the collection of hidden states, each step, and each epoch. Epoch 0 is
    the initial weights."""

    collected: Progress
    stepped: Step
    measured: Measured


def fit(task: Task, file: Path, start: float, watcher: Watcher) -> tuple[int, int]:
    """Train the module of a task until the last epoch or early stopping, and give it the weights of
    the best epoch. Return the number of the best epoch, 0 for the initial weights, and the number
    of epochs.

    Args:
        file: A checkpoint after the last complete epoch, from which the run resumes if it exists.
        start: The score of the initial weights, which compete as epoch 0.
    """
    module, config, steps = task.module, task.config, task.steps
    total, rate = steps * config.epochs, config.learning_rate
    rising = max(1, int(WARM_UP * total))
    warm_up = optimizers.linear_schedule(rate / rising, rate, rising)
    cosine = optimizers.cosine_decay(rate, max(1, total - rising))
    schedule = optimizers.join_schedules([warm_up, cosine], [rising])
    optimizer = optimizers.AdamW(schedule, bias_correction=True)
    optimizer.init(module.trainable_parameters())
    epoch, best_epoch, best = 0, 0, module.parameters()
    # Checkpoints store the best score in float32. Keep it so, or resuming could change results.
    best_score = np.float32(start)
    if file.exists():
        state: Any = tree_unflatten(list(safetensors_file.load(file).items()))
        mx.eval(state)
        module.update(state["module"])
        best, optimizer.state = state["best"], state["optimizer"]
        epoch, best_epoch = state["epoch"].item(), state["best_epoch"].item()
        best_score = np.float32(state["best_score"].item())
    learn = nn.value_and_grad(module, task.loss)
    while epoch < min(config.epochs, best_epoch + PATIENCE):
        chance = np.random.default_rng(epoch)
        examples = task.shuffled(chance)
        batch = task.take(examples[0], chance)
        for step in range(1, steps + 1):
            value, gradients = learn(*batch)
            optimizer.update(module, gradients)
            mx.async_eval(value, module.parameters(), optimizer.state)
            if step < steps:
                # The host reads the next batch from disk while the device computes.
                batch = task.take(examples[step], chance)
            watcher.stepped(epoch * steps + step, total, float(value.item()))
        epoch += 1
        figures = task.evaluate()
        if np.float32(figures.score) < best_score:
            best_epoch, best_score = epoch, np.float32(figures.score)
            best = module.parameters()
        state = {
            "module": module.parameters(),
            "best": best,
            "optimizer": optimizer.state,
            "epoch": mx.array(epoch),
            "best_epoch": mx.array(best_epoch),
            "best_score": mx.array(float(best_score)),
        }
        new = file.with_name("new.safetensors")
        mx.save_safetensors(str(new), dict(tree_flatten(state)))
        os.replace(new, file)
        watcher.measured(epoch, figures)
    module.update(best)
    return best_epoch, epoch


class Training:
    """The training data in a directory, on which drafts are trained. Raises PromptError if the data
    has too few usable texts. hidden: See `collect`. digest: The SHA-256 of the data file. prompts:
    The prompt of each sample."""

    def __init__(
        self,
        pair: Pair,
        file: Path,
        directory: Path,
        config: TrainConfig,
        watcher: Watcher,
        hidden: Sequence[str] = (),
    ) -> None:
        self._started = time.perf_counter()
        self.pair = pair
        self._directory = directory
        self._watcher = watcher
        samples = [(prompt.turns[0], prompt.target) for prompt in read_prompts(file)]
        random.Random(0).shuffle(samples)
        self.digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self._settings = {
            "model": pair.name,
            "weights": fingerprint(pair.target.network),
            "tokenizer": pair.tokenizer.digest,
            "prefix": pair.task_prefix,
            "digest": self.digest,
            "data": [config.samples, config.length, config.self_distill],
            "hidden": list(hidden),
        }
        self._resumed = _keep(directory / "rows", self._settings)
        width = pair.target.width * (len(hidden) + 1)
        self.rows = SampleFiles(directory / "rows", width, pair.target.state_dtype)
        self.prompts = collect(pair, samples, config, self.rows, watcher.collected, hidden)

    def improve(self, task: Task, output: Path, origin: Mapping[str, str], write: Write) -> str:
        """Train a task, write the result, and return a report in one line.

        The weights of the best epoch are written, or the initial ones. The report has their figures
        as rounded for storage. origin: The identity of the initial weights. write: Writes the files
        of the result.
        """
        start = task.evaluate()
        self._watcher.measured(0, start)
        directory = self._directory / "fit"
        _keep(directory, {**self._settings, "fit": asdict(task.config), "origin": origin})
        checkpoint = directory / "checkpoint.safetensors"
        best, epochs = fit(task, checkpoint, start.score, self._watcher)
        round_as_stored(task.module)
        figures = task.evaluate()
        facts = {
            **origin,
            "training": asdict(task.config),
            "epochs": epochs,
            "best_epoch": best,
            "held_out": {"start": asdict(start), "result": asdict(figures)},
        }
        with destination.directory(output) as made:
            write(made, facts)
        rows, held_out = task.count(task.train), task.count(task.held_out)
        seconds = time.perf_counter() - self._started
        again = ", with what an earlier run had left" if self._resumed else ""
        return (
            f"{output}: {'' if best else 'no gain, the start is kept, after '}{epochs} epochs on "
            f"{rows} tokens in {seconds:.0f} s{again}; on {held_out} held-out tokens "
            f"{figures.describe()}" + (f"; at the start {start.describe()}" if best else "")
        )


STORED_DTYPE = mx.bfloat16
"""Dtype of trained weights in files."""


def round_as_stored(network: nn.Module) -> None:
    """Round every weight to its value after storing and loading. The dtype stays float32."""

    def rounded(path: str, array: mx.array) -> mx.array:
        return array.astype(stored_type(network, path, array)).astype(array.dtype)

    network.update(tree_map_with_path(rounded, network.parameters()))
    mx.eval(network.parameters())


def stored_type(network: nn.Module, name: str, array: mx.array) -> mx.Dtype:
    """Return the dtype in which a weight is stored: STORED_DTYPE, or its own if the model must not
    cast it."""
    may = getattr(network, "cast_predicate", lambda _: True)
    return STORED_DTYPE if may(name) and mx.issubdtype(array.dtype, mx.floating) else array.dtype


@contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """Yield the path of the hidden directory, which is removed if the block ends without an error.
    Raises OutputError if `output` exists, its name is not UTF-8, or the block raises OSError."""
    try:
        str(output).encode("utf-8")
    except UnicodeError:
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
    """Make the directory, or empty it if it was made for other settings. Return whether it was made
    for the same settings."""
    note = directory / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    note.write_text(text, encoding="utf-8")
    return False
