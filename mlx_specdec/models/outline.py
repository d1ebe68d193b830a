"""config.json -> a model known by its arrays' shapes, which random numbers may fill.

Until `model` is called no array holds anything, so that the outline of a model that fits nowhere
costs nothing. Reads no weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..text.tokenizer import Kind
from . import families
from .base import Base
from .number_format import NumberFormat
from .random_weights import fill


def outline(
    config: Mapping[str, Any],
    name: str,
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    depth: int | None = None,
) -> Outline:
    """The outline of the model that a configuration describes.

    name: for messages. dtype, q_bits, q_group_size: as `loading.load_model` has them, where "as
    stored" is what config.json says. depth: a model of so many layers instead; an encoder then has
    one, since no step runs it.

    Raises OptionError for settings that do not suit, CheckpointError for a configuration that does
    not describe a supported model, or not one that can have this depth.
    """
    numbers = NumberFormat(dtype, q_bits, q_group_size)
    return families.of_config(config).outline(config, name, numbers, depth)


class Outline(ABC):
    """A model of which only the configuration is known.

    kind: its family. dtype: its numbers in words. vocabulary: width of the logits. network: whose
    arrays are not computed yet. nbytes: of all weights. layers: for each layer that decodes what it
    looks like; equal entries cost the same. layer_nbytes: of each of those layers' weights.
    """

    kind: Kind
    dtype: str
    vocabulary: int

    def __init__(self, network: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.network = network
        self.nbytes = _nbytes_of(network)
        self.layers: Sequence[Hashable] = [_look_of(layer) for layer in layers]
        self.layer_nbytes: Sequence[int] = [_nbytes_of(layer) for layer in layers]

    @property
    def token_nbytes(self) -> Sequence[int]:
        """Bytes of each table that has a row for every token: embedding, and a head of its own."""
        tables: dict[str, int] = {}
        for name, array in self.weights().items():
            if array.shape[:1] == (self.vocabulary,):
                table = name.rpartition(".")[0]
                tables[table] = tables.get(table, 0) + array.nbytes
        return list(tables.values())

    @abstractmethod
    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Bytes of all caches after `prompt` tokens and `generated` more."""

    def weights(self) -> Mapping[str, mx.array]:
        """All arrays by name; they hold numbers once `model` was called."""
        return dict(tree_flatten(self.network.parameters()))

    def model(self, seed: int = 0, given: Mapping[str, mx.array] | None = None) -> Base:
        """The model with random weights; this is what takes memory and time. Once only.

        given: arrays to take by name, so that two depths of one model share their memory.
        """
        fill(self.network, seed, given or {})
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
