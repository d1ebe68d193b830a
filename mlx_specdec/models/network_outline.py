"""What outlines of both families have in common: a network whose arrays hold nothing yet."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .random_weights import fill


class NetworkOutline:
    """The part of an `outline.Outline` that follows from the network alone."""

    def __init__(self, network: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._network = network
        self.nbytes = nbytes_of(network)
        self.layers: Sequence[Hashable] = [look_of(layer) for layer in layers]
        self.layer_nbytes: Sequence[int] = [nbytes_of(layer) for layer in layers]

    def weights(self) -> Mapping[str, mx.array]:
        """As Outline says."""
        return dict(tree_flatten(self._network.parameters()))

    def fill(self, seed: int, given: Mapping[str, mx.array] | None) -> None:
        """Put random numbers into the network; see `random_weights.fill`."""
        fill(self._network, seed, given or {})


def nbytes_of(module: nn.Module) -> int:
    """Bytes of all arrays in a module."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def look_of(module: nn.Module) -> Hashable:
    """Names, shapes and types of all arrays in a module."""
    return tuple(
        (name, array.shape, str(array.dtype)) for name, array in tree_flatten(module.parameters())
    )
