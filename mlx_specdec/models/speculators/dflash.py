"""DFlash: a block of tokens at once, whose layers attend to the target's hidden states and to the
block itself. DSpark adds, token by token, what the token before says of the next.

Source: arXiv 2602.06036 (DFlash) and arXiv 2607.05147 (DSpark).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.speculators.dflash import CONFIDENCE, BlockFiles
from ..base import Base
from ..kv_cache import KVCache
from .layers import Attention, Layer, Source
from .markov import ConfidenceHead, MarkovHead
from .speculator import Reading, Speculator

Attend = Callable[[mx.array], mx.array]


class DFlash(Speculator):
    """The network of a directory, DSpark's with its Markov head."""

    def __init__(self, files: BlockFiles, target: Base) -> None:
        super().__init__(files, target)
        sizes = files.sizes
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self.layers = [self.layer(files, number) for number in range(sizes.count)]
        if files.markov is not None:
            self.markov_head = MarkovHead(files)
        if CONFIDENCE in files.tensors:
            self.confidence_head = ConfidenceHead(files)
        self._window_behind_block = files.window_behind_block
        self._sight = tuple(zip(files.windows, files.causal, strict=True))
        self.slots, self.skipped, self.mask_token = files.slots, files.skipped, files.mask_token

    @property
    def most(self) -> int:
        """How many tokens a block drafts."""
        return self.slots - self.skipped

    def open(self) -> DFlashReading:
        """A sequence of which nothing was read."""
        return DFlashReading(self)

    def layer(self, files: BlockFiles, number: int) -> Layer:
        """One of its layers."""
        return Layer(files.sizes, number, files.sizes.width, files.tensors)

    def through(
        self, layer: Layer, states: mx.array, attend: Attend, source: Source | None = None
    ) -> mx.array:
        """What a layer makes of (1, slots, width). attend: its attention. source: see `sources`."""
        return layer.finish(states, attend(layer.input_layernorm(states)), source)

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """From the head's (1, 1, the drafter's vocabulary) for a slot to logits over the target's.

        token: (1, 1) int32, the one before. state: (1, 1, width), what the head was given. carried:
        what the slot before returned as such."""
        if "markov_head" in self:
            bias, carried = self.markov_head.step(token, state, carried)
            logits = logits + bias
        return self.over_target(logits), carried

    def chance(self, token: mx.array, state: mx.array) -> mx.array:
        """How likely what a slot drafts is to stay if all before it does, (1, 1) float32. token,
        state: as in `slot_logits`."""
        before = self.markov_head.markov_w1(token) if "markov_head" in self else None
        return mx.sigmoid(self.confidence_head.logits(state, before))

    def context(self, hidden: mx.array) -> mx.array:
        """(1, m, taps x target's width) -> (1, m, width), of which layers make keys and values."""
        states: mx.array = self.hidden_norm(self.fc(hidden.astype(self.dtype)))
        return states

    def masks(self, before: int) -> list[mx.array | None]:
        """Per layer what each slot of a block behind `before` rows may look at."""
        columns = mx.arange(before + self.slots)
        rows = columns[before:, None]
        masks: list[mx.array | None] = []
        for window, causal in self._sight:
            mask = None
            if window is not None and self._window_behind_block:
                mask = columns[None] >= before - window
            elif window is not None:
                mask = rows - columns < window
            if causal:
                mask = columns <= rows if mask is None else mask & (columns <= rows)
            masks.append(mask)
        return masks


class DFlashReading(Reading):
    """One sequence: keys and values of the target's hidden states; those of blocks are dropped."""

    def __init__(self, network: DFlash) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._newest: mx.array | None = None
        self._states: mx.array | None = None
        self._logits: mx.array | None = None
        self._carried: mx.array | None = None
        self._chances: list[mx.array] = []
        self._index = 0

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As drafting.speculator.Reading says."""
        offset = self._rows.advance(following, 0).starts[0]
        context = self._network.context(hidden)
        for layer, cache in zip(self._network.layers, self._caches, strict=True):
            cache.append(*layer.self_attn.keys_values(context, offset))
        self._newest = following[:, -1:]

    def guess(self, count: int) -> mx.array:
        """As drafting.speculator.Reading says."""
        assert self._newest is not None, "something was read"
        skipped = self._network.skipped
        states = self._block(self._newest)
        self._logits = self._network.own_logits(states[:, skipped : skipped + count])
        self._states, self._carried, self._index = states, None, -1
        self._chances = []
        if skipped and "markov_head" in self._network:
            head = self._network.markov_head
            _, self._carried = head.step(self._newest, states[:, :1], None)
        return self.guess_after(self._newest)

    def guess_after(self, token: mx.array) -> mx.array:
        """As drafting.speculator.Reading says."""
        network = self._network
        assert self._logits is not None and self._states is not None, "a block was begun"
        self._index += 1
        slot = network.skipped + self._index
        state = self._states[:, slot : slot + 1]
        if "confidence_head" in network:
            self._chances.append(network.chance(token, state))
        logits, self._carried = network.slot_logits(
            self._logits[:, self._index : self._index + 1], token, state, self._carried
        )
        return logits

    def chances(self) -> mx.array | None:
        """As drafting.speculator.Reading says."""
        return mx.concatenate(self._chances, axis=1) if self._chances else None

    def _block(self, newest: mx.array) -> mx.array:
        """What the last norm puts out for all slots, (1, slots, width)."""
        network = self._network
        masked = mx.full((1, network.slots - 1), network.mask_token, dtype=mx.int32)
        tokens = mx.concatenate([newest, masked], axis=1)
        states = network.embed(tokens)
        offset = self._rows.advance(tokens, network.slots).starts[0]
        parts = zip(network.layers, self._caches, network.masks(offset), self._sources, strict=True)
        for layer, cache, mask, source in parts:
            attend = partial(_attend, layer.self_attn, cache, offset, mask)
            states = network.through(layer, states, attend, source)
        normed: mx.array = network.norm(states)
        return normed


def _attend(
    attention: Attention, cache: KVCache, offset: int, mask: mx.array | None, rows: mx.array
) -> mx.array:
    queries = attention.queries(rows, offset)
    keys, values = cache.append(*attention.keys_values(rows, offset))
    return attention.attend(queries, keys, values, mask)


network = DFlash
