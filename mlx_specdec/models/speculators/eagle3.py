"""EAGLE-3: one layer on three of the target's hidden states, its own output fed back to draft on.

Source: Li et al., arXiv 2503.01840, section 3.1.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.speculators.eagle3 import Eagle3Files
from ...checkpoints.speculators.sizes import LayerSizes
from ..base import Base
from ..kv_cache import KVCache
from .layers import Layer, Source
from .speculator import Reading, Speculator


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


class Eagle3(Speculator):
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

    @property
    def most(self) -> int:
        """A chain has no end of its own."""
        return sys.maxsize

    def open(self) -> Eagle3Reading:
        """A sequence of which nothing was read."""
        return Eagle3Reading(self)

    def features(self, hidden: mx.array) -> mx.array:
        """(1, m, taps x target's width) -> (1, m, width), what the first step is given."""
        hidden = hidden.astype(self.dtype)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        states: mx.array = self.fc(hidden)
        return states

    def step(
        self,
        tokens: mx.array,
        states: mx.array,
        caches: Sequence[KVCache],
        offset: int,
        sources: Sequence[Source | None],
    ) -> tuple[mx.array, mx.array]:
        """See (1, m) tokens and the states before them, the first at `offset`; returns what the
        head is given and what the next step is. sources: see `Speculator.sources`."""
        mask: Any = "causal" if tokens.shape[1] > 1 else None
        residual, both = self.layers[0].inputs(self.embed(tokens), states)
        parts = zip(self.layers, caches, sources, strict=True)
        for number, (layer, cache, source) in enumerate(parts):
            if number:
                residual, both = states, layer.input_layernorm(states)
            queries = layer.self_attn.queries(both, offset)
            keys, values = cache.append(*layer.self_attn.keys_values(both, offset))
            attended = layer.self_attn.attend(queries, keys, values, mask)
            states = layer.finish(residual, attended, source)
        normed = self.norm(states)
        head = normed if self._norms_before_head else states
        return head, normed if self._feeds_back_normed else states


class Eagle3Reading(Reading):
    """One sequence: a row for each token that the target has seen, with the one after it."""

    def __init__(self, network: Eagle3) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._newest: tuple[mx.array, mx.array] | None = None
        self._guessed: mx.array | None = None

    def attend(self, encoded: mx.array) -> None:
        """As drafting.speculator.Reading says."""
        self._sources = self._network.sources(encoded)

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As drafting.speculator.Reading says."""
        head, fed_back = self._step(following, self._network.features(hidden), 0)
        self._newest = head[:, -1:], fed_back[:, -1:]

    def guess(self, count: int) -> mx.array:
        """As drafting.speculator.Reading says."""
        assert self._newest is not None, "something was read"
        head, self._guessed = self._newest
        return self._logits(head)

    def guess_after(self, token: mx.array) -> mx.array:
        """As drafting.speculator.Reading says."""
        assert self._guessed is not None, "the first token was guessed"
        head, self._guessed = self._step(token, self._guessed, 1)
        return self._logits(head)

    def _step(self, tokens: mx.array, states: mx.array, proposed: int) -> tuple[mx.array, mx.array]:
        place = self._rows.advance(tokens, proposed)
        return self._network.step(tokens, states, self._caches, place.starts[0], self._sources)

    def _logits(self, head: mx.array) -> mx.array:
        return self._network.over_target(self._network.own_logits(head))


network = Eagle3
