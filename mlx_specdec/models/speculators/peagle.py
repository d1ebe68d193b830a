"""P-EAGLE: EAGLE-3's layers see the newest token and places that are to be filled in one pass.

Source: arXiv 2602.01469. A place behind the newest token has the mask's token and a learned state.
"""

from __future__ import annotations

import mlx.core as mx

from ...checkpoints.speculators.peagle import MASK, PEagleFiles
from ..base import Base
from .eagle3 import Eagle3
from .speculator import Reading


class PEagle(Eagle3):
    """The network of a directory."""

    def __init__(self, files: PEagleFiles, target: Base) -> None:
        super().__init__(files, target)
        self.mask_hidden = mx.zeros(files.tensors[MASK].shape)
        self._mask_token = files.mask_token
        self._depths = files.depths

    @property
    def most(self) -> int:
        """As many tokens as it was trained to draft at once."""
        return self._depths

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return PEagleReading(self)

    def masked(self, count: int) -> tuple[mx.array, mx.array]:
        """States and tokens of `count` places that are to be filled."""
        tokens = mx.full((1, count), self._mask_token, dtype=mx.int32)
        return mx.repeat(self.mask_hidden, count, axis=1), tokens


class PEagleReading(Reading):
    """One sequence: what was read waits for the next guess, so that both are one pass."""

    def __init__(self, network: PEagle) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._waiting: tuple[mx.array, mx.array] | None = None
        self._newest: mx.array | None = None
        self._logits: mx.array | None = None
        self._index = 0

    @property
    def length(self) -> int:
        """As drafting.speculator.Reading says."""
        return super().length + (0 if self._waiting is None else self._waiting[1].shape[1])

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As drafting.speculator.Reading says."""
        self._see(0)
        self._waiting = hidden.astype(self._network.dtype), following

    def guess(self, count: int) -> mx.array:
        """As drafting.speculator.Reading says."""
        masked = self._see(count - 1)
        assert self._newest is not None, "something was read"
        network, states = self._network, mx.concatenate([self._newest, masked], axis=1)
        self._logits = network.over_target(network.own_logits(states))
        self._index = 0
        return self._logits[:, :1]

    def guess_after(self, token: mx.array) -> mx.array:
        """As drafting.speculator.Reading says; all that is to come was guessed at once."""
        assert self._logits is not None, "the first token was guessed"
        self._index += 1
        return self._logits[:, self._index : self._index + 1]

    def evaluate(self) -> None:
        """As drafting.speculator.Reading says."""
        self._see(0)
        super().evaluate()

    def _see(self, masked: int) -> mx.array:
        """What waits, and `masked` places behind it, for which it returns what the head is given,
        (1, masked, width)."""
        network, waiting = self._network, self._waiting
        hidden, tokens = network.masked(masked)
        if waiting is not None:
            hidden = mx.concatenate([waiting[0], hidden], axis=1)
            tokens = mx.concatenate([waiting[1], tokens], axis=1)
            self._waiting = None
        rows = tokens.shape[1]
        if rows == 0:
            return mx.zeros((1, 0, network.norm.weight.size), dtype=network.dtype)
        offset = self._rows.advance(tokens, masked).starts[0]
        head, _ = network.step(
            tokens, network.features(hidden), self._caches, offset, self._sources
        )
        if rows > masked:
            self._newest = head[:, rows - masked - 1 : rows - masked]
        return head[:, rows - masked :]


network = PEagle
