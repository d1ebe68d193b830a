"""How far a draft's law is from its target's, row by row, and what that means for drafting.

Knows arrays. Source: DistillSpec (Zhou et al., arXiv 2310.08461, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

_FLOOR = -80.0
"""Smallest log-probability told apart: less is no number in float32 once it is a probability."""


def log_probabilities(logits: mx.array) -> mx.array:
    """(..., vocabulary) logits of any type -> float32 log-probabilities at temperature 1."""
    wide = logits.astype(mx.float32)
    return mx.maximum(wide - mx.logsumexp(wide, axis=-1, keepdims=True), _FLOOR)


def forward(target: mx.array, draft: mx.array) -> mx.array:
    """KL(target || draft): the draft covers whatever the target may say."""
    return (mx.exp(target) * (target - draft)).sum(axis=-1)


def reverse(target: mx.array, draft: mx.array) -> mx.array:
    """KL(draft || target): the draft says nothing that the target would not."""
    return forward(draft, target)


def jensen_shannon(target: mx.array, draft: mx.array) -> mx.array:
    """The mean of both laws' KL to the law between them."""
    middle = mx.logaddexp(target, draft) - mx.log(mx.array(2.0))
    return (forward(target, middle) + forward(draft, middle)) / 2


def total_variation(target: mx.array, draft: mx.array) -> mx.array:
    """Half of sum |p - q|: the share that speculative sampling rejects."""
    return mx.abs(mx.exp(target) - mx.exp(draft)).sum(axis=-1) / 2


DIVERGENCES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "forward": forward,
    "reverse": reverse,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""By the names of settings.DIVERGENCES; each takes (rows, vocabulary) log p, gives (rows,)."""


@dataclass(frozen=True)
class Closeness:
    """On texts that were held out, averaged over their tokens.

    loss: the divergence that is learned by. acceptance: probability that a token drafted at
    temperature 1 is accepted, sum min(p, q) (Leviathan et al., arXiv 2211.17192, corollary 3.6).
    agreement: share of rows with the same likeliest token, accepted at temperature 0.
    """

    loss: float
    acceptance: float
    agreement: float

    @property
    def score(self) -> float:
        """What a fit makes small: the rejected share."""
        return 1 - self.acceptance


class Tally:
    """Adds up how close rows are, batch by batch. kind: of the loss."""

    def __init__(self, kind: str) -> None:
        self._divergence = DIVERGENCES[kind]
        self._sums = mx.zeros((3,))
        self._rows = 0

    def add(self, target: mx.array, draft: mx.array) -> None:
        """Both (rows, vocabulary) logits."""
        p, q = log_probabilities(target), log_probabilities(draft)
        accepted = mx.exp(mx.minimum(p, q)).sum()
        agreeing = (mx.argmax(target, axis=-1) == mx.argmax(draft, axis=-1)).sum()
        self._sums = self._sums + mx.stack([self._divergence(p, q).sum(), accepted, agreeing])
        self._rows += target.shape[0]
        mx.eval(self._sums)

    def closeness(self) -> Closeness:
        """Over everything added."""
        means = np.array(self._sums) / max(self._rows, 1)
        return Closeness(*means.tolist())
