"""A task -> what it trains, trained: steps, held-out figures, early stop and checkpoints.

Knows the optimiser and its files. Knows nothing of texts and of what is trained. Interrupted at any
moment and started again, it ends with the very weights that it would have had anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints.formats import safetensors as safetensors_file
from .settings import Schedule

HELD_OUT = 0.1
STEPS_BETWEEN = 50
"""Steps between two checkpoints: all that an interruption can lose."""

Step = Callable[[int, int, float], None]
"""Called after each step with (done, total, its loss)."""


class Figures(Protocol):
    """What was measured on held-out texts."""

    @property
    def score(self) -> float:
        """The smaller the better."""
        ...


F = TypeVar("F", bound=Figures, covariant=True)


class Task(Protocol[F]):
    """Something to train."""

    @property
    def module(self) -> nn.Module:
        """Whose trainable parameters are learned."""
        ...

    @property
    def steps(self) -> int:
        """Batches in an epoch, one or more."""
        ...

    def batch(self, epoch: int, place: int) -> tuple[mx.array, ...]:
        """One batch of an epoch, the same whenever it is asked for; epochs and places from 0."""
        ...

    def loss(self, *batch: mx.array) -> mx.array:
        """Of the module as it is, one number; gradients are taken through it."""
        ...

    def judge(self) -> F:
        """Of the module as it is, on held-out texts."""
        ...


@dataclass(frozen=True)
class Outcome(Generic[F]):
    """figures: of what was kept, the best epoch's. best: its number, 0 for the start. epochs: how
    many there were."""

    figures: F
    best: int
    epochs: int


class Fit(Generic[F]):
    """One training of a task's module, which ends as the best of all epochs.

    file: the checkpoint, read where it exists and written on the way. start: figures of the module
    as it is, where that is one of those that may be the best; it is then epoch 0.
    """

    def __init__(
        self, task: Task[F], schedule: Schedule, file: Path, start: F | None = None
    ) -> None:
        self._task = task
        self._module = task.module
        self._schedule = schedule
        self._file = file
        self._total = task.steps * schedule.epochs
        self._optimizer = optimizers.AdamW(self._rate(), bias_correction=True)
        self._step = 0
        self._best = None if start is None else (0, _as_kept(start.score))
        self._best_weights = _copy(self._module)
        self._optimizer.init(self._module.trainable_parameters())
        if file.exists():
            self._read()

    def run(self, step: Step, measured: Callable[[int, F], None]) -> Outcome[F]:
        """Train to the end. measured: called after each epoch with its number, from 1."""
        learn = nn.value_and_grad(self._module, self._task.loss)
        while self._step < self._total and not self._stuck():
            value, gradients = learn(*self._task.batch(*divmod(self._step, self._task.steps)))
            self._optimizer.update(self._module, gradients)
            mx.eval(value, self._module.parameters(), self._optimizer.state)
            self._step += 1
            if self._step % self._task.steps == 0:
                measured(self._epochs, self._judge())
            elif self._step % STEPS_BETWEEN == 0:
                self._write()
            step(self._step, self._total, float(value.item()))
        self._module.update(tree_unflatten(list(self._best_weights.items())))
        best = self._best[0] if self._best else 0
        return Outcome(self._task.judge(), best, self._epochs)

    @property
    def _epochs(self) -> int:
        return self._step // self._task.steps

    def _rate(self) -> Callable[[mx.array], mx.array]:
        rate = self._schedule.learning_rate
        rising = max(1, int(self._schedule.warm_up * self._total))
        return optimizers.join_schedules(
            [
                optimizers.linear_schedule(rate / rising, rate, rising),
                optimizers.cosine_decay(rate, max(1, self._total - rising)),
            ],
            [rising],
        )

    def _judge(self) -> F:
        """At the end of an epoch: keep the module if it is the best."""
        figures = self._task.judge()
        score = _as_kept(figures.score)
        if self._best is None or score < self._best[1]:
            self._best = (self._epochs, score)
            self._best_weights = _copy(self._module)
        self._write()
        return figures

    def _stuck(self) -> bool:
        """Whether the last epochs brought nothing; decided between epochs."""
        if self._best is None or self._step % self._task.steps:
            return False
        return self._epochs - self._best[0] >= self._schedule.patience

    def _write(self) -> None:
        epoch, score = self._best or (-1, 0.0)
        tensors = {
            **{f"module.{name}": array for name, array in _copy(self._module).items()},
            **{f"best.{name}": array for name, array in self._best_weights.items()},
            **{f"optimizer.{name}": array for name, array in tree_flatten(self._optimizer.state)},
            "step": mx.array(self._step),
            "best_epoch": mx.array(epoch),
            "best_score": mx.array(score),
        }
        new = self._file.with_name("new.safetensors")
        mx.save_safetensors(str(new), tensors)
        os.replace(new, self._file)

    def _read(self) -> None:
        safetensors_file.read_header(self._file)
        tensors = safetensors_file.load(self._file)

        def part(prefix: str) -> list[tuple[str, mx.array]]:
            return [
                (name.removeprefix(prefix), array)
                for name, array in tensors.items()
                if name.startswith(prefix)
            ]

        self._module.update(tree_unflatten(part("module.")))
        self._best_weights = dict(part("best."))
        self._optimizer.state = tree_unflatten(part("optimizer."))
        self._step, epoch = (int(_number(tensors[name])) for name in ("step", "best_epoch"))
        self._best = (epoch, _number(tensors["best_score"])) if epoch >= 0 else None
        mx.eval(self._module.parameters(), self._best_weights, self._optimizer.state)


def _copy(module: nn.Module) -> dict[str, mx.array]:
    """Arrays are never written to: keeping them is a copy."""
    return dict(tree_flatten(module.parameters()))


def _as_kept(score: float) -> float:
    """As a checkpoint has it, so that an interruption changes no comparison."""
    return float(np.float32(score))


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]
