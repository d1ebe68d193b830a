"""A draft and the texts that it learns its target's law on, as a task to fit.

Knows a network to train, and where the target's hidden states lie. Knows no optimiser and no files
of models. A batch holds texts of about one length; memory holds one batch of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..models.base import Base
from ..models.trainable import Ids, Trainable
from .divergence import DIVERGENCES, Closeness, Tally, log_probabilities
from .fit import HELD_OUT
from .rows import Rows
from .settings import Distilling

WINDOW = 16
"""So many batches' texts, next to each other in an epoch's order, are sorted by length."""


class DraftTask:
    """fit.Task of a draft.

    base, rows: the target and its hidden states. prompts: what stands before each of the rows'
    samples. vocabulary: how many ids both models have.
    """

    def __init__(
        self,
        draft: Trainable,
        base: Base,
        rows: Rows,
        prompts: Sequence[Ids],
        vocabulary: int,
        settings: Distilling,
    ) -> None:
        self._draft = draft
        self._base = base
        self._rows = rows
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._settings = settings
        self._starts = rows.starts
        self._texts = rows.texts()
        self._train, self._held_out = rows.split_samples(HELD_OUT)
        self._order: tuple[int, list[np.ndarray]] = (-1, [])

    @property
    def module(self) -> nn.Module:
        """As Task says."""
        return self._draft.network

    @property
    def rows(self) -> int:
        """Tokens that are learned from."""
        return self._tokens(self._train)

    @property
    def held_out(self) -> int:
        """Tokens to judge by."""
        return self._tokens(self._held_out)

    @property
    def steps(self) -> int:
        """As Task says."""
        return -(-len(self._train) // self._settings.batch)

    def batch(self, epoch: int, place: int) -> tuple[mx.array, ...]:
        """The target's logits, and what the draft is given; each text once an epoch."""
        if self._order[0] != epoch:
            draw = np.random.default_rng((self._settings.seed, epoch))
            self._order = epoch, self._batches(draw)
        return self._take(self._order[1][place])

    def loss(self, *batch: mx.array) -> mx.array:
        """As Task says: the divergence, averaged over tokens."""
        target, *inputs = batch
        divergence = DIVERGENCES[self._settings.divergence]
        return divergence(log_probabilities(target), log_probabilities(self._logits(inputs))).mean()

    def judge(self) -> Closeness:
        """As Task says."""
        tally, size = Tally(self._settings.divergence), self._settings.batch
        order = self._by_length(self._held_out)
        for start in range(0, len(order), size):
            target, *inputs = self._take(order[start : start + size])
            tally.add(target, self._logits(inputs))
        return tally.closeness()

    def _logits(self, inputs: Sequence[mx.array]) -> mx.array:
        return self._draft.logits(*inputs)[:, : self._vocabulary]

    def _take(self, samples: np.ndarray) -> tuple[mx.array, ...]:
        texts = [self._texts[sample] for sample in samples]
        spans = zip(self._starts[samples], texts, strict=True)
        rows = np.concatenate([np.arange(start, start + len(text)) for start, text in spans])
        logits = self._base.head(self._rows.states(rows)[None])[0, :, : self._vocabulary]
        return logits, *self._draft.inputs([self._prompts[sample] for sample in samples], texts)

    def _batches(self, draw: np.random.Generator) -> list[np.ndarray]:
        """Every text once, in batches; as many as `steps`."""
        order, size = draw.permutation(self._train), self._settings.batch
        reach = size * WINDOW
        parts = [self._by_length(order[at : at + reach]) for at in range(0, len(order), reach)]
        batches = [p[at : at + size] for p in parts for at in range(0, len(p), size)]
        return [batches[number] for number in draw.permutation(len(batches))]

    def _by_length(self, samples: np.ndarray) -> np.ndarray:
        lengths = [len(self._prompts[s]) + len(self._texts[s]) for s in samples]
        return samples[np.argsort(lengths, kind="stable")]

    def _tokens(self, samples: np.ndarray) -> int:
        return sum(len(self._texts[sample]) for sample in samples)
