"""Guessing token after token, each from what the network made of the one before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..kv_cache import KVCache
from ..rows import Rows
from .layers import Attention, Source
from .speculator import Reading, Speculator

Attend = Callable[[int, Attention, mx.array], mx.array]
"""Of a layer's number, its attention and what that is given, (1, m, inputs): what it puts out."""


class Chain(Speculator):
    """A network whose own output is what its next step is given in the place of a target's hidden
    state.

    A kind has `first`, what its first layer adds to and what it attends with, from tokens and the
    states before them; and `ends`, what the head and the next step are given, from what the last
    layer puts out.
    """

    @property
    def most(self) -> int:
        """A chain has no end of its own."""
        return sys.maxsize

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return ChainReading(self, len(self.layers))

    def features(self, hidden: mx.array) -> mx.array:
        """What the first step is given, (1, m, width), from the target's hidden states side by
        side, (1, m, taps x width)."""
        return hidden.astype(self.dtype)

    def through(
        self, tokens: mx.array, states: mx.array, sources: Sequence[Source | None], attend: Attend
    ) -> mx.array:
        """All layers, over (batch, m) tokens and the states before them, (batch, m, width)."""
        residual, rows = self.first(tokens, states)
        for number, layer in enumerate(self.layers):
            if number:
                residual, rows = states, layer.input_layernorm(states)
            attended = attend(number, layer.self_attn, rows)
            states = layer.finish(residual, attended, sources[number])
        return states

    def step(
        self,
        tokens: mx.array,
        states: mx.array,
        caches: list[Any],
        offset: int,
        sources: Sequence[Source | None],
    ) -> tuple[mx.array, mx.array]:
        """See (1, m) tokens and the states before them, the first at `offset`; returns what the
        head is given and what the next step is. sources: see `Speculator.sources`."""
        attend = partial(_attend, caches, offset)
        return self.ends(self.through(tokens, states, sources, attend))


class ChainReading(Reading):
    """One sequence: a row for each token that the target has seen, with the one after it."""

    def __init__(self, network: Chain, layers: int, cache: Callable[[Rows], Any] = KVCache) -> None:
        super().__init__(layers, cache)
        self._network = network
        self._newest: tuple[mx.array, mx.array] | None = None
        self._guessed: mx.array | None = None

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


def _attend(
    caches: list[Any], offset: int, number: int, attention: Attention, rows: mx.array
) -> mx.array:
    mask = "causal" if rows.shape[1] > 1 else None
    queries = attention.queries(rows, offset)
    keys, values = caches[number].append(*attention.keys_values(rows, offset))
    return attention.attend(queries, keys, values, mask)
