"""Guessing token after token, each from what the network made of the one before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from ..kv_cache import KVCache
from ..rows import Rows
from .speculator import Reading


class Chained(Protocol):
    """A network whose own output is what its next step is given in the place of a target's hidden
    state."""

    def features(self, hidden: mx.array) -> mx.array:
        """(1, m, taps x target's width) -> (1, m, width), what the first step is given."""
        ...

    def step(
        self, tokens: mx.array, states: mx.array, caches: list[Any], offset: int
    ) -> tuple[mx.array, mx.array]:
        """See (1, m) tokens and the states before them, the first at `offset`; returns what the
        head is given and what the next step is."""
        ...

    def own_logits(self, states: mx.array) -> mx.array:
        """As Speculator has it."""
        ...

    def over_target(self, logits: mx.array) -> mx.array:
        """As Speculator has it."""
        ...


class ChainReading(Reading):
    """One sequence: a row for each token that the target has seen, with the one after it."""

    def __init__(
        self, network: Chained, layers: int, cache: Callable[[Rows], Any] = KVCache
    ) -> None:
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
        return self._network.step(tokens, states, self._caches, place.starts[0])

    def _logits(self, head: mx.array) -> mx.array:
        return self._network.over_target(self._network.own_logits(head))
