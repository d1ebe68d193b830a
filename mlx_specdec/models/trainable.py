"""Networks that can be trained, and batches of sequences of different lengths. A
training pass runs over complete sequences without caches. Padding follows a sequence, and causal
attention never looks ahead at it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Ids = Sequence[int]
"""Token ids of a sequence."""


@dataclass(frozen=True)
class Trainable:
    """A network that can be trained on prompts and their completions.

    Attributes:
        inputs: Returns the arguments of `logits` for prompts and the completions after them. None
            of them may be empty.
        logits: Returns the logits that predict each token of all completions, one completion after
            the other, (rows, vocabulary).
    """

    network: nn.Module
    inputs: Callable[[Sequence[Ids], Sequence[Ids]], tuple[mx.array, ...]]
    logits: Callable[..., mx.array]


def padded(texts: Sequence[Ids]) -> np.ndarray:
    """Return sequences as (sequences, longest) int32, with zeros after the shorter ones."""
    result = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        result[row, : len(text)] = text
    return result


def places(spans: Sequence[tuple[int, int]], width: int) -> np.ndarray:
    """Return indices into a flattened (sequences, width) array. They select, one sequence after the
    other, the positions begin .. end - 1 of the sequence's span."""
    parts = [np.arange(a, b) + row * width for row, (a, b) in enumerate(spans)]
    return np.concatenate(parts).astype(np.int32)
