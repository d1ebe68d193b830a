"""A task -> its module, trained: steps, held-out figures, early stop and checkpoints.

Interrupted at any moment and started again, it ends with the very weights that it would have had
anyway.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints.formats import safetensors as safetensors_file
from .config import TrainConfig

HELD_OUT = 0.1
WINDOW = 16
"""Batches whose examples, next to each other in an epoch's order, are put in order together."""
STEPS_BETWEEN = 50
"""Steps between two checkpoints: all that an interruption can lose."""

Step = Callable[[int, int, float], None]
"""Called after each step with (done, total, its loss)."""
Measured = Callable[[int, Any], None]
"""Called after each epoch with its number, from 1, and figures of the held-out texts."""


class Task(ABC):
    """Something to train.

    module: whose trainable parameters are learned. train, held_out: numbers of the examples to
    learn from and to evaluate on. What it measures, its figures, has a `score`: the smaller the
    better.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, train: np.ndarray, held_out: np.ndarray
    ) -> None:
        self.module = module
        self.train = train
        self.held_out = held_out
        self._config = config
        self._order: tuple[int, Sequence[np.ndarray]] = (-1, [])

    @property
    def steps(self) -> int:
        """Batches in an epoch, one or more."""
        return -(-len(self.train) // self._config.batch)

    def batch(self, epoch: int, place: int) -> tuple[mx.array, ...]:
        """One batch of an epoch, the same at every call; epochs and places from 0."""
        if self._order[0] != epoch:
            draw = np.random.default_rng((self._config.seed, epoch))
            self._order = epoch, self.shuffled(draw)
        chance = np.random.default_rng((self._config.seed, epoch, place))
        return self.take(self._order[1][place], chance)

    def evaluate(self) -> Any:
        """Of the module as it is, on the held-out examples."""
        total = mx.array(0.0)
        for number, part in enumerate(self.cut(self.ordered(self.held_out))):
            total = total + self.sums(*self.take(part, np.random.default_rng(number)))
            mx.eval(total)
        return self.figures(total)

    def cut(self, examples: np.ndarray) -> list[np.ndarray]:
        """In batches."""
        return np.split(examples, range(self._config.batch, len(examples), self._config.batch))

    def in_windows(self, draw: np.random.Generator) -> Sequence[np.ndarray]:
        """Every example to learn from once, as `ordered` within a few batches of a random order."""
        order, reach = draw.permutation(self.train), self._config.batch * WINDOW
        parts = [self.ordered(order[at : at + reach]) for at in range(0, len(order), reach)]
        batches = [batch for part in parts for batch in self.cut(part)]
        return [batches[number] for number in draw.permutation(len(batches))]

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        """As they are best taken together."""
        return examples

    def count(self, examples: np.ndarray) -> int:
        """Tokens of these examples."""
        return len(examples)

    @abstractmethod
    def shuffled(self, draw: np.random.Generator) -> Sequence[np.ndarray]:
        """Every example to learn from once, in as many batches as `steps`."""

    @abstractmethod
    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """What `loss` and `sums` are given for these examples. chance: for whatever is drawn."""

    @abstractmethod
    def loss(self, *batch: mx.array) -> mx.array:
        """Of the module as it is, one number; gradients are taken through it."""

    @abstractmethod
    def sums(self, *batch: mx.array) -> mx.array:
        """What is added up over the held-out examples, of one shape."""

    @abstractmethod
    def figures(self, total: mx.array) -> Any:
        """From what was added up."""


@dataclass(frozen=True)
class Outcome:
    """figures: of the best epoch. best: its number, 0 for the start. epochs: how
    many there were."""

    figures: Any
    best: int
    epochs: int


class Fit:
    """One training of a task's module, which ends as the best of all epochs.

    file: the checkpoint, read where it exists and written on the way. start: figures of the module
    as it is, where that is one of those that may be the best; it is then epoch 0.
    """

    def __init__(self, task: Task, config: TrainConfig, file: Path, start: Any = None) -> None:
        self._task = task
        self._module = task.module
        self._config = config
        self._file = file
        self._total = task.steps * config.epochs
        self._optimizer = optimizers.AdamW(self._rate(), bias_correction=True)
        self._step = self._best_epoch = 0
        # As a checkpoint has it, so that an interruption changes no comparison.
        self._best_score = np.float32(math.inf if start is None else start.score)
        self._best = self._module.parameters()
        self._optimizer.init(self._module.trainable_parameters())
        if file.exists():
            self._read()

    def run(self, step: Step, measured: Measured) -> Outcome:
        """Train to the end."""
        learn = nn.value_and_grad(self._module, self._task.loss)
        while self._step < self._total:
            is_between = self._step % self._task.steps == 0
            if is_between and self._epochs - self._best_epoch >= self._config.patience:
                break
            value, gradients = learn(*self._task.batch(*divmod(self._step, self._task.steps)))
            self._optimizer.update(self._module, gradients)
            mx.eval(value, self._module.parameters(), self._optimizer.state)
            self._step += 1
            if self._step % self._task.steps == 0:
                measured(self._epochs, self._evaluate())
            elif self._step % STEPS_BETWEEN == 0:
                self._write()
            step(self._step, self._total, float(value.item()))
        self._module.update(self._best)
        return Outcome(self._task.evaluate(), self._best_epoch, self._epochs)

    @property
    def _epochs(self) -> int:
        return self._step // self._task.steps

    def _rate(self) -> Callable[[mx.array], mx.array]:
        rate = self._config.learning_rate
        rising = max(1, int(self._config.warm_up * self._total))
        return optimizers.join_schedules(
            [
                optimizers.linear_schedule(rate / rising, rate, rising),
                optimizers.cosine_decay(rate, max(1, self._total - rising)),
            ],
            [rising],
        )

    def _evaluate(self) -> Any:
        """At the end of an epoch: keep the module if it is the best."""
        figures = self._task.evaluate()
        score = np.float32(figures.score)
        if score < self._best_score:
            self._best_epoch, self._best_score = self._epochs, score
            self._best = self._module.parameters()
        self._write()
        return figures

    def _write(self) -> None:
        state = {
            "module": self._module.parameters(),
            "best": self._best,
            "optimizer": self._optimizer.state,
            "step": mx.array(self._step),
            "best_epoch": mx.array(self._best_epoch),
            "best_score": mx.array(float(self._best_score)),
        }
        new = self._file.with_name("new.safetensors")
        mx.save_safetensors(str(new), dict(tree_flatten(state)))
        os.replace(new, self._file)

    def _read(self) -> None:
        safetensors_file.read_header(self._file)
        state: dict[str, Any] = tree_unflatten(list(safetensors_file.load(self._file).items()))
        mx.eval(state)
        self._module.update(state["module"])
        self._best = state["best"]
        self._optimizer.state = state["optimizer"]
        self._step, self._best_epoch = state["step"].item(), state["best_epoch"].item()
        self._best_score = np.float32(state["best_score"].item())
