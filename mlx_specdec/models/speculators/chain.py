"""Guessing token after token, each from what the network made of the one before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..kv_cache import KVCache
from ..rows import Rows
from .speculator import Reading, Speculator


class Chain(Speculator):
    """A network whose own output is what its next step is given in the place of a target's hidden
    state.

    A kind has `features`, what its first step is given, (1, m, width), from the target's hidden
    states side by side, (1, m, taps x width); and `step`, as Eagle3 has it.
    """

    @property
    def most(self) -> int:
        """A chain has no end of its own."""
        return sys.maxsize

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return ChainReading(self, len(self.layers))


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
