"""A draft and the texts that it learns its target's distribution on, as a task to fit.

A batch holds texts of about one length; memory holds one batch of logits. Source of the
divergences: DistillSpec (Zhou et al., arXiv 2310.08461, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..models.base import Base
from ..models.trainable import Ids, Trainable
from .config import DistillConfig
from .fit import HELD_OUT, Task
from .rows import Rows

_FLOOR = -80.0
"""Smallest log-probability told apart: less is no number in float32 once it is a probability."""


def log_probabilities(logits: mx.array) -> mx.array:
    """(..., vocabulary) logits of any type -> float32 log-probabilities at temperature 1."""
    wide = logits.astype(mx.float32)
    return mx.maximum(wide - mx.logsumexp(wide, axis=-1, keepdims=True), _FLOOR)


def forward(target: mx.array, draft: mx.array) -> mx.array:
    """KL(target || draft): the draft covers whatever the target may say."""
    return (mx.exp(target) * (target - draft)).sum(axis=-1)


def jensen_shannon(target: mx.array, draft: mx.array) -> mx.array:
    """The mean of both distributions' KL to the distribution between them."""
    middle = mx.logaddexp(target, draft) - mx.log(mx.array(2.0))
    return (forward(target, middle) + forward(draft, middle)) / 2


def total_variation(target: mx.array, draft: mx.array) -> mx.array:
    """Half of sum |p - q|: the share that speculative sampling rejects."""
    return mx.abs(mx.exp(target) - mx.exp(draft)).sum(axis=-1) / 2


DIVERGENCES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "forward": forward,
    # The draft says nothing that the target would not.
    "reverse": lambda target, draft: forward(draft, target),
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""By the names of DistillConfig; each takes (rows, vocabulary) log p, gives (rows,)."""


@dataclass(frozen=True)
class Closeness:
    """On texts that were held out, averaged over their tokens.

    loss: the divergence that is minimized. acceptance: probability that a token drafted at
    temperature 1 is accepted, sum min(p, q) (Leviathan et al., arXiv 2211.17192, corollary 3.6).
    agreement: share of rows with the same likeliest token, accepted at temperature 0.
    """

    loss: float
    acceptance: float
    agreement: float

    @property
    def score(self) -> float:
        """What a fit minimizes: the rejected share."""
        return 1 - self.acceptance


class DraftTask(Task):
    """Task of a draft, whose examples are the rows' samples.

    base, rows: the target and its hidden states. prompts: what stands before each sample.
    vocabulary: how many ids both models have.
    """

    def __init__(
        self,
        draft: Trainable,
        base: Base,
        rows: Rows,
        prompts: Sequence[Ids],
        vocabulary: int,
        config: DistillConfig,
    ) -> None:
        super().__init__(draft.network, config, *rows.split(HELD_OUT))
        self._draft = draft
        self._base = base
        self._rows = rows
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._divergence = DIVERGENCES[config.divergence]
        self._texts = rows.texts()

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        lengths = [len(self._prompts[s]) + len(self._texts[s]) for s in examples]
        return examples[np.argsort(lengths, kind="stable")]

    def count(self, examples: np.ndarray) -> int:
        return sum(len(self._texts[sample]) for sample in examples)

    def shuffled(self, draw: np.random.Generator) -> Sequence[np.ndarray]:
        return self.in_windows(draw)

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """The target's logits (tokens, vocabulary), and what the draft is given."""
        texts = [self._texts[sample] for sample in examples]
        spans = zip(self._rows.starts[examples], texts, strict=True)
        rows = np.concatenate([np.arange(start, start + len(text)) for start, text in spans])
        logits = self._base.head(self._rows.states(rows)[None])[0, :, : self._vocabulary]
        return logits, *self._draft.inputs([self._prompts[sample] for sample in examples], texts)

    def loss(self, *batch: mx.array) -> mx.array:
        """The divergence, averaged over tokens."""
        return self._divergence(*map(log_probabilities, self._logits(*batch))).mean()

    def sums(self, *batch: mx.array) -> mx.array:
        """(4,): the divergence, the accepted share, equal first choices, and how many tokens."""
        target, draft = self._logits(*batch)
        p, q = log_probabilities(target), log_probabilities(draft)
        accepted = mx.exp(mx.minimum(p, q)).sum()
        agreeing = (mx.argmax(target, axis=-1) == mx.argmax(draft, axis=-1)).sum()
        return mx.stack([self._divergence(p, q).sum(), accepted, agreeing, mx.array(len(target))])

    def figures(self, total: mx.array) -> Closeness:
        return Closeness(*(np.array(total[:3]) / total[3].item()).tolist())

    def _logits(self, target: mx.array, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        return target, self._draft.logits(*inputs)[:, : self._vocabulary]
