"""A model of which only the configuration is known: a network whose arrays hold nothing yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..text.tokenizer import Kind
from .base import Base
from .random_weights import fill


class Outline(ABC):
    """A model of which only the configuration is known.

    kind: its family. dtype: its numbers in words. vocabulary: width of the logits. nbytes: of all
    weights. layers: for each layer that decodes what it looks like; equal entries cost the same.
    layer_nbytes: of each of those layers' weights.
    """

    kind: Kind
    dtype: str
    vocabulary: int

    def __init__(self, network: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._network = network
        self.nbytes = _nbytes_of(network)
        self.layers: Sequence[Hashable] = [_look_of(layer) for layer in layers]
        self.layer_nbytes: Sequence[int] = [_nbytes_of(layer) for layer in layers]

    @abstractmethod
    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Bytes of all caches after `prompt` tokens and `generated` more."""

    def weights(self) -> Mapping[str, mx.array]:
        """All arrays by name; they hold numbers once `model` was called."""
        return dict(tree_flatten(self._network.parameters()))

    def model(self, seed: int = 0, given: Mapping[str, mx.array] | None = None) -> Base:
        """The model with random weights; this is what takes memory and time. Once only.

        given: arrays to take by name, so that two depths of one model share their memory.
        """
        fill(self._network, seed, given or {})
        return self._model()

    @abstractmethod
    def _model(self) -> Base:
        """The model over the network."""


def _nbytes_of(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _look_of(module: nn.Module) -> Hashable:
    """Names, shapes and types of all arrays in a module."""
    return tuple(
        (name, array.shape, str(array.dtype)) for name, array in tree_flatten(module.parameters())
    )
