"""Rows -> trained heads: steps, held-out accuracy, early stop, and checkpoints to go on from.

Knows the optimiser and its files. Knows nothing of texts and of models. Interrupted at any moment
and started again, it ends with the heads that it would have had anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import safetensors_file
from ..models.medusa_heads import MedusaHeads
from .new_heads import Accuracy, Tally, loss
from .rows import Rows
from .settings import Fitting

HELD_OUT = 0.1
STEPS_BETWEEN = 50
"""Steps between two checkpoints: all that an interruption can lose."""

Step = Callable[[int, int, float], None]
"""Called after each step with (done, total, its loss)."""
Measured = Callable[[int, Accuracy], None]
"""Called after each epoch with its number, from 1, and held-out accuracy."""


@dataclass(frozen=True)
class Outcome:
    """accuracy: of the heads kept, those of the best epoch. epochs: how many there were."""

    accuracy: Accuracy
    epochs: int
    rows: int
    held_out: int


class Fit:
    """One training of `heads`, which end as the best of all epochs.

    file: the checkpoint, read where it exists and written on the way.
    """

    def __init__(self, heads: MedusaHeads, rows: Rows, settings: Fitting, file: Path) -> None:
        self._heads = heads
        self._rows = rows
        self._settings = settings
        self._file = file
        self._targets = rows.targets(heads.count)
        self._train, self._held_out = rows.split(HELD_OUT)
        self._per_epoch = -(-len(self._train) // settings.batch)
        self._total = self._per_epoch * settings.epochs
        self._optimizer = optimizers.AdamW(learning_rate=self._schedule())
        self._step = 0
        self._order = -1, self._train
        self._best: tuple[int, float] | None = None
        self._best_weights = _copy(heads)
        self._optimizer.init(heads.trainable_parameters())
        if file.exists():
            self._read()

    def run(self, step: Step, measured: Measured) -> Outcome:
        """Train to the end."""
        learn = nn.value_and_grad(self._heads, lambda *rows: loss(self._heads, *rows))
        while self._step < self._total and not self._stuck():
            value, gradients = learn(*self._batch())
            self._optimizer.update(self._heads, gradients)
            mx.eval(value, self._heads.parameters(), self._optimizer.state)
            self._step += 1
            if self._step % self._per_epoch == 0:
                measured(self._epochs, self._judge())
            elif self._step % STEPS_BETWEEN == 0:
                self._write()
            step(self._step, self._total, float(value.item()))
        self._heads.update(tree_unflatten(list(self._best_weights.items())))
        return Outcome(self._accuracy(), self._epochs, len(self._train), len(self._held_out))

    @property
    def _epochs(self) -> int:
        return self._step // self._per_epoch

    def _schedule(self) -> Callable[[mx.array], mx.array]:
        rate = self._settings.learning_rate
        rising = max(1, int(self._settings.warm_up * self._total))
        return optimizers.join_schedules(
            [
                optimizers.linear_schedule(rate / rising, rate, rising),
                optimizers.cosine_decay(rate, max(1, self._total - rising)),
            ],
            [rising],
        )

    def _batch(self) -> tuple[mx.array, mx.array]:
        """The rows of the next step: each once an epoch, in an order that the seed gives."""
        epoch, place = divmod(self._step, self._per_epoch)
        if self._order[0] != epoch:
            draw = np.random.default_rng((self._settings.seed, epoch))
            self._order = epoch, draw.permutation(self._train)
        order = self._order[1]
        size = self._settings.batch
        # Sorted, because they are read from a disk.
        return self._take(np.sort(order[place * size : (place + 1) * size]))

    def _take(self, rows: np.ndarray) -> tuple[mx.array, mx.array]:
        return self._rows.states(rows), mx.array(self._targets[rows])

    def _judge(self) -> Accuracy:
        """At the end of an epoch: keep the heads if they are the best."""
        accuracy = self._accuracy()
        if self._best is None or accuracy.loss < self._best[1]:
            self._best = (self._epochs, accuracy.loss)
            self._best_weights = _copy(self._heads)
        self._write()
        return accuracy

    def _stuck(self) -> bool:
        """Whether the last epochs brought nothing; decided between epochs."""
        if self._best is None or self._step % self._per_epoch:
            return False
        return self._epochs - self._best[0] >= self._settings.patience

    def _accuracy(self) -> Accuracy:
        tally, size = Tally(self._heads.count), self._settings.batch
        for start in range(0, len(self._held_out), size):
            tally.add(self._heads, *self._take(self._held_out[start : start + size]))
        return tally.accuracy()

    def _write(self) -> None:
        best = self._best or (0, 0.0)
        tensors = {
            **{f"heads.{name}": array for name, array in _copy(self._heads).items()},
            **{f"best.{name}": array for name, array in self._best_weights.items()},
            **{f"optimizer.{name}": array for name, array in tree_flatten(self._optimizer.state)},
            "step": mx.array(self._step),
            "best_epoch": mx.array(best[0]),
            "best_loss": mx.array(best[1]),
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

        self._heads.update(tree_unflatten(part("heads.")))
        self._best_weights = dict(part("best."))
        self._optimizer.state = tree_unflatten(part("optimizer."))
        self._step, epoch = (int(_number(tensors[name])) for name in ("step", "best_epoch"))
        self._best = (epoch, _number(tensors["best_loss"])) if epoch else None
        mx.eval(self._heads.parameters(), self._best_weights, self._optimizer.state)


def _copy(heads: MedusaHeads) -> dict[str, mx.array]:
    """Arrays are never written to: keeping them is a copy."""
    return dict(tree_flatten(heads.parameters()))


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]
