"""Training of Medusa heads. Source of the loss: Medusa (Cai et al., arXiv 2401.10774, section
2.2.1)."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoints.shards import HEADS
from ..engine.pair import Pair
from ..models.base import Base
from ..models.drafters.medusa import BASE_KEY, HEADS_KEY, LAYERS_KEY, MedusaHeads
from .config import HeadsConfig, TrainConfig
from .fit import Task, Training, Watcher, work_directory

DECAY = 0.8
"""Head i has the loss weight DECAY ** i: its token is accepted only if all earlier heads' are."""
TOP = 5
"""Accuracy is also reported for the TOP most likely tokens of a head."""


@dataclass(frozen=True)
class Accuracy:
    """Loss and accuracy on held-out rows. top1, top5: For each head the share of rows whose token
    is the most likely one, or among the TOP most likely ones."""

    loss: float
    top1: tuple[float, ...]
    top5: tuple[float, ...]

    @property
    def score(self) -> float:
        return self.loss

    def describe(self) -> str:
        """Return the accuracy of each head in words."""
        pairs = zip(self.top1, self.top5, strict=True)
        return "; ".join(
            f"head {at} top-1 {first:.1%} top-5 {among:.1%}"
            for at, (first, among) in enumerate(pairs, start=1)
        )


class HeadTask(Task):
    """The training task of Medusa heads, whose examples are rows. A batch is hidden states, (n,
    width), and the tokens to predict, (n, heads) int32, which are -1 after the end of a sample."""

    def __init__(self, heads: MedusaHeads, training: Training, config: TrainConfig) -> None:
        super().__init__(heads, training, config)
        lengths = self._rows.lengths
        is_held_out = np.repeat(np.isin(np.arange(len(lengths)), self.held_out), lengths)
        self.train, self.held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
        self._heads, self._targets = heads, self._rows.targets(heads.count)

    def shuffled(self, draw: np.random.Generator) -> Sequence[np.ndarray]:
        """Return random batches. Rows are sorted within a batch to read the disk in order."""
        return [np.sort(part) for part in self.cut(draw.permutation(self.train))]

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        return self._rows.states(examples), mx.array(self._targets[examples])

    def loss(self, *batch: mx.array) -> mx.array:
        _, entropy, valid = self._entropy(*batch)
        return _weighted(entropy.sum(axis=1), valid.sum(axis=1))

    def sums(self, *batch: mx.array) -> mx.array:
        """Return sums over rows, (4, heads): the loss, the number of tokens, and the tokens that
        are the most likely one or among the TOP most likely ones."""
        states, targets = batch
        logits, entropy, valid = self._entropy(states, targets)
        right = mx.take_along_axis(logits, mx.maximum(targets.T, 0)[..., None], axis=-1)
        better = (logits > right).sum(axis=-1)
        parts = entropy, valid, (better < 1) & valid, (better < TOP) & valid
        return mx.stack([part.sum(axis=1).astype(mx.float32) for part in parts])

    def figures(self, total: mx.array) -> Accuracy:
        """Return averages over the tokens that the heads predict."""
        lost, count, first, among = np.array(total)
        count = np.maximum(count, 1)
        top1, top5 = ((part / count).round(4).tolist() for part in (first, among))
        loss = _weighted(mx.array(lost), mx.array(count))
        return Accuracy(float(np.array(loss)), tuple(top1), tuple(top5))

    def _entropy(self, states: mx.array, targets: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return logits (heads, n, vocabulary), cross-entropy (heads, n), and the mask (heads, n)
        of the rows with a token. The cross-entropy of the others is 0."""
        heads = self._heads
        refined = heads.refine(states.astype(mx.float32), heads.count)
        logits = heads.project(refined).astype(mx.float32)
        entropy = nn.losses.cross_entropy(logits, mx.maximum(targets.T, 0))
        return logits, mx.where(targets.T >= 0, entropy, 0), targets.T >= 0


def initial_heads(base: Base, count: int, layers: int, *, own_output: bool) -> MedusaHeads:
    """Return heads that predict the same as the base: their residual layers add zero. The weights
    are float32, because steps are too small for 16 bits."""
    width = base.width
    parts: list[Any] = [
        {"linear": {"weight": mx.zeros((count, width, width)), "bias": mx.zeros((count, width))}}
        for _ in range(layers)
    ]
    if own_output:
        # This gives the base's output matrix even if it is tied or quantized.
        unit = mx.eye(width, dtype=base.state_dtype)[None]
        columns = base.head(unit)[0].astype(mx.float32).T
        parts.append({"weight": mx.repeat(columns[None], count, axis=0)})
    heads = MedusaHeads(base, parts)
    mx.eval(heads.parameters())
    return heads


def _weighted(sums: mx.array, counts: mx.array) -> mx.array:
    """Return the mean of each head, averaged over heads with the weights DECAY ** i."""
    weights = DECAY ** mx.arange(len(sums))
    return (sums / mx.maximum(counts, 1) * weights).sum() / weights.sum()


def train(pair: Pair, file: Path, output: Path, config: HeadsConfig, watcher: Watcher) -> str:
    """Train heads for the target of `pair`, write them to the directory `output`, and return a
    report in one line.

    Raises:
        PromptError: If the data has too few usable texts.
        OutputError: If `output` exists or cannot be written.
    """
    with work_directory(output) as directory:
        training = Training(pair, file, directory, config, watcher)
        shape = config.heads, config.layers
        heads = initial_heads(pair.target, *shape, own_output=config.own_output)
        # A local base is stored as a path relative to `output`.
        path = os.path.expanduser(pair.name)
        base = os.path.relpath(path, output) if os.path.isdir(path) else pair.name
        finish = partial(write, heads=heads, base=base)
        return training.improve(HeadTask(heads, training, config), output, {}, finish)


def write(directory: Path, facts: Mapping[str, Any], heads: MedusaHeads, base: str) -> None:
    """Write config.json and bfloat16 heads in the layout that text-generation-inference loads. It
    has no place for `facts`."""
    tensors = {name: array.astype(mx.bfloat16) for name, array in heads.tensors().items()}
    shapes = next(iter(tensors.values())).shape
    config = {
        BASE_KEY: base,
        HEADS_KEY: heads.count,
        LAYERS_KEY: heads.layers,
        "hidden_size": shapes[-1],
        "vocab_size": heads.vocabulary,
    }
    mx.save_safetensors(str(directory / HEADS), tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
