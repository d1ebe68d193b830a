"""Medusa heads and the rows that they learn, as a task to fit. Knows no files of heads."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..models.medusa_heads import MedusaHeads
from .fit import HELD_OUT
from .new_heads import Accuracy, Tally, loss
from .rows import Rows


class HeadTask:
    """fit.Task of some heads; `size` rows in a batch, in an order that `seed` gives.

    rows, held_out: how many are learned from, and how many are not.
    """

    def __init__(self, heads: MedusaHeads, rows: Rows, size: int, seed: int) -> None:
        self.module = heads
        self._rows = rows
        self._size = size
        self._seed = seed
        self._targets = rows.targets(heads.count)
        self._train, self._held_out = rows.split(HELD_OUT)
        self._order = -1, self._train

    @property
    def rows(self) -> int:
        """Learned from."""
        return len(self._train)

    @property
    def held_out(self) -> int:
        """Rows to judge by."""
        return len(self._held_out)

    @property
    def steps(self) -> int:
        """As Task says."""
        return -(-len(self._train) // self._size)

    def batch(self, epoch: int, place: int) -> tuple[mx.array, ...]:
        """States and targets of the next rows: each row once an epoch."""
        if self._order[0] != epoch:
            draw = np.random.default_rng((self._seed, epoch))
            self._order = epoch, draw.permutation(self._train)
        order = self._order[1]
        # Sorted, because they are read from a disk.
        return self._take(np.sort(order[place * self._size : (place + 1) * self._size]))

    def loss(self, *batch: mx.array) -> mx.array:
        """As Task says."""
        return loss(self.module, *batch)

    def judge(self) -> Accuracy:
        """As Task says."""
        tally = Tally(self.module.count)
        for start in range(0, len(self._held_out), self._size):
            tally.add(self.module, *self._take(self._held_out[start : start + self._size]))
        return tally.accuracy()

    def _take(self, rows: np.ndarray) -> tuple[mx.array, mx.array]:
        return self._rows.states(rows), mx.array(self._targets[rows])
