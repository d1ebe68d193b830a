"""EAGLE-1, EAGLE-2 and HASS: the state that the target's head is given, guessed token by token.

Source: Li et al., arXiv 2401.15077, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...checkpoints.speculators.eagle import EagleFiles
from ..base import Base
from ..kv_cache import KVCache
from .chain import Chain
from .layers import Layer, Source


class Eagle(Chain):
    """The network of a directory."""

    def __init__(self, files: EagleFiles, target: Base) -> None:
        super().__init__(files, target)
        sizes = files.sizes
        self.layers = [
            Layer(sizes, number, sizes.width, files.tensors) for number in range(sizes.count)
        ]

    def features(self, hidden: mx.array) -> mx.array:
        """The target's states are what it guesses itself."""
        return hidden.astype(self.dtype)

    def step(
        self,
        tokens: mx.array,
        states: mx.array,
        caches: Sequence[KVCache],
        offset: int,
        sources: Sequence[Source | None],
    ) -> tuple[mx.array, mx.array]:
        """As Eagle3 says."""
        mask: Any = "causal" if tokens.shape[1] > 1 else None
        states = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        for layer, cache, source in zip(self.layers, caches, sources, strict=True):
            rows = layer.input_layernorm(states) if "input_layernorm" in layer else states
            queries = layer.self_attn.queries(rows, offset)
            keys, values = cache.append(*layer.self_attn.keys_values(rows, offset))
            attended = layer.self_attn.attend(queries, keys, values, mask)
            states = layer.finish(states, attended, source)
        return states, states


network = Eagle
