"""Examples -> batches of few fixed shapes: a new shape makes kernels plan anew."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Example = tuple[Sequence[int], Sequence[int]]
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """source, mask: (examples, source length) int64; labels: (examples, target length) int64,
    IGNORED where there is no token."""

    source: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.source.numel() + self.labels.numel()


def bucketed(examples: Sequence[Example], tokens: int, dice: random.Random) -> Iterator[Batch]:
    """Batches of about `tokens` positions, lengths rounded up to multiples of 8, shuffled."""
    waiting: dict[tuple[int, int], list[Example]] = {}
    groups: list[tuple[tuple[int, int], list[Example]]] = []
    order = list(examples)
    dice.shuffle(order)
    for example in order:
        shape = (_rounded(len(example[0])), _rounded(len(example[1])))
        group = waiting.setdefault(shape, [])
        group.append(example)
        if len(group) >= max(1, tokens // sum(shape)):
            groups.append((shape, waiting.pop(shape)))
    groups += waiting.items()
    dice.shuffle(groups)
    for shape, group in groups:
        yield padded(group, *shape)


def padded(examples: Sequence[Example], source_length: int, target_length: int) -> Batch:
    """One batch of the given shape."""
    source = torch.zeros(len(examples), source_length, dtype=torch.long)
    mask = torch.zeros_like(source)
    labels = torch.full((len(examples), target_length), IGNORED, dtype=torch.long)
    for index, (inputs, targets) in enumerate(examples):
        source[index, : len(inputs)] = torch.tensor(inputs)
        mask[index, : len(inputs)] = 1
        labels[index, : len(targets)] = torch.tensor(targets)
    return Batch(source, mask, labels)


def _rounded(length: int) -> int:
    return (length + 7) // 8 * 8
