"""EAGLE-1, EAGLE-2 and HASS: the state that the target's head is given, guessed token by token.

Source: Li et al., arXiv 2401.15077, section 4.1.
"""

from __future__ import annotations

import mlx.core as mx

from ...checkpoints.speculators.eagle import EagleFiles
from ..base import Base
from .chain import Chain
from .layers import Layer


class Eagle(Chain):
    """The network of a directory."""

    def __init__(self, files: EagleFiles, target: Base) -> None:
        super().__init__(files, target)
        sizes = files.sizes
        self.layers = [
            Layer(sizes, number, sizes.width, files.tensors) for number in range(sizes.count)
        ]

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says; nothing is normed."""
        both: mx.array = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        return both, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says; both are one."""
        return states, states


network = Eagle
