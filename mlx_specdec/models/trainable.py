"""What training needs of a network, and how texts of different lengths lie in one array. Passes
over whole texts, several side by side and without caches: what is padded lies behind a text, where
nothing of it looks."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Ids = Sequence[int]
"""Token ids of a text."""


class Trainable(Protocol):
    """A network with what a training asks of it."""

    @property
    def network(self) -> nn.Module: ...

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """What `logits` takes for these prompts and the texts after them, none of them empty."""

    def logits(self, *inputs: mx.array) -> mx.array:
        """(rows, vocabulary): for each token of each text, text after text, what predicts it."""


def padded(texts: Sequence[Ids]) -> np.ndarray:
    """(texts, longest) int32, zeros behind what is shorter."""
    result = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        result[row, : len(text)] = text
    return result


def places(spans: Sequence[tuple[int, int]], width: int) -> np.ndarray:
    """Places in the flattened (texts, width) of each text's span begin .. end - 1."""
    parts = [np.arange(a, b) + row * width for row, (a, b) in enumerate(spans)]
    return np.concatenate(parts).astype(np.int32)
