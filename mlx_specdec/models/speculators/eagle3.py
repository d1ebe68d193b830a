"""EAGLE-3: one layer on three of the target's hidden states, its own output fed back to draft on.

Source: Li et al., arXiv 2503.01840, section 3.1.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.speculators.eagle3 import Eagle3Files
from ...checkpoints.speculators.sizes import LayerSizes
from ..base import Base
from .chain import Chain
from .layers import Layer


class FirstLayer(Layer):
    """The layer that sees each token's embedding beside the hidden state before it."""

    def __init__(self, sizes: LayerSizes, present: Collection[str], norm_before_residual: bool):
        super().__init__(sizes, 0, 2 * sizes.width, present)
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self._norm_before_residual = norm_before_residual

    def inputs(self, embedded: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """What is added to, and what queries, keys and values are made of."""
        normed = self.hidden_norm(states)
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return (normed if self._norm_before_residual else states), both


class Eagle3(Chain):
    """The network of a directory."""

    def __init__(self, files: Eagle3Files, target: Base) -> None:
        super().__init__(files, target)
        sizes, present = files.sizes, files.tensors
        first = FirstLayer(sizes, present, files.norm_before_residual)
        others = [Layer(sizes, each, sizes.width, present) for each in range(1, sizes.count)]
        self.layers = [first, *others]
        if "input_norm.weight" in present:
            self.input_norm = nn.RMSNorm(files.taps * files.target_width, sizes.eps)
        if "fc_norm.0.weight" in present:
            self.fc_norm = [nn.RMSNorm(files.target_width, sizes.eps) for _ in range(files.taps)]
        self._norms_before_head = files.norms_before_head
        self._feeds_back_normed = files.feeds_back_normed

    def features(self, hidden: mx.array) -> mx.array:
        """As Chain says."""
        hidden = hidden.astype(self.dtype)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        states: mx.array = self.fc(hidden)
        return states

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says."""
        both: tuple[mx.array, mx.array] = self.layers[0].inputs(self.embed(tokens), states)
        return both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says."""
        normed = self.norm(states)
        head = normed if self._norms_before_head else states
        return head, normed if self._feeds_back_normed else states


network = Eagle3
