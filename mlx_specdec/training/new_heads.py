"""Heads before their first step, what they lose on rows, and how often they are right.

Knows arrays. Knows nothing of files and of optimisers.
Source of the loss: Medusa (Cai et al., arXiv 2401.10774, section 2.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..models.base import Base
from ..models.medusa_heads import MedusaHeads

DECAY = 0.8
"""Head i counts DECAY ** i: what it says matters only where those before it were right."""
TOP = 5


@dataclass(frozen=True)
class Accuracy:
    """On texts that were held out: the weighted loss, and per head the share of rows whose token
    is the likeliest, and among the likeliest TOP."""

    loss: float
    top1: tuple[float, ...]
    top5: tuple[float, ...]

    @property
    def score(self) -> float:
        """What a fit makes small: the loss."""
        return self.loss


def fresh(base: Base, count: int, layers: int, *, own_output: bool) -> MedusaHeads:
    """Heads that say what the base says of the next token: residual layers that add nothing.

    float32, whatever the base's dtype: steps are too small for half precision.
    """
    width = base.width
    zeros = [(mx.zeros((count, width, width)), mx.zeros((count, width))) for _ in range(layers)]
    heads = MedusaHeads(base, zeros)
    if own_output:
        # The columns of the base's output layer, whatever holds them: tied, packed or neither.
        unit = mx.eye(width, dtype=base.state_dtype)[None]
        columns = base.head(unit)[0].astype(mx.float32).T
        heads.output = mx.repeat(columns[None], count, axis=0)
    mx.eval(heads.parameters())
    return heads


def loss(heads: MedusaHeads, states: mx.array, targets: mx.array) -> mx.array:
    """Cross-entropy, averaged over each head's rows and then over heads with DECAY.

    states: (n, width). targets: (n, heads) int32, -1 where a head has nothing to say.
    """
    cross_entropy, valid = _cross_entropy(_logits(heads, states), targets.T)
    per_head = cross_entropy.sum(axis=1) / mx.maximum(valid.sum(axis=1), 1)
    weights = DECAY ** mx.arange(heads.count)
    return (per_head * weights).sum() / weights.sum()


class Tally:
    """Adds up what heads get right, batch by batch."""

    def __init__(self, count: int) -> None:
        self._sums = mx.zeros((4, count))
        self._weights = DECAY ** mx.arange(count)

    def add(self, heads: MedusaHeads, states: mx.array, targets: mx.array) -> None:
        """As `loss` takes them."""
        logits, asked = _logits(heads, states), targets.T
        cross_entropy, valid = _cross_entropy(logits, asked)
        right = mx.take_along_axis(logits, mx.maximum(asked, 0)[..., None], axis=-1)
        better = (logits > right).sum(axis=-1)
        first, among = (better < 1) & valid, (better < TOP) & valid
        new = [part.sum(axis=1) for part in (cross_entropy, valid, first, among)]
        self._sums = self._sums + mx.stack([part.astype(mx.float32) for part in new])
        mx.eval(self._sums)

    def accuracy(self) -> Accuracy:
        """Over everything added."""
        lost, valid, first, among = self._sums
        count = mx.maximum(valid, 1)
        total = (lost / count * self._weights).sum() / self._weights.sum()
        return Accuracy(float(total.item()), _shares(first / count), _shares(among / count))  # type: ignore[arg-type]


def _logits(heads: MedusaHeads, states: mx.array) -> mx.array:
    """(heads, n, vocabulary) float32."""
    refined = heads.refine(states.astype(mx.float32), heads.count)
    return heads.project(refined).astype(mx.float32)


def _cross_entropy(logits: mx.array, asked: mx.array) -> tuple[mx.array, mx.array]:
    """(heads, n) of both: 0 where nothing was asked, and where something was."""
    valid = asked >= 0
    entropy = nn.losses.cross_entropy(logits, mx.maximum(asked, 0))
    return mx.where(valid, entropy, 0), valid


def _shares(values: mx.array) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values.tolist())  # type: ignore[union-attr,arg-type]
