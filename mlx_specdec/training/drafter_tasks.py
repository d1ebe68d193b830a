"""DSpark's task: blocks behind anchors, with a Markov head, and a head that says how sure it is.

Source: arXiv 2602.06036, section 4 (DFlash), and arXiv 2607.05147 (DSpark).
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..models.drafters.dflash import DFlash
from ..models.drafters.eagle3 import Eagle3
from ..models.drafters.layers import Attention
from . import anchors as behind_anchors
from .anchors import Anchored, AnchorTask, KeysValues, compared

GAMMA = 4.0
"""The weight of a block's tokens falls to 1 / e within so many of them."""


class DSparkTask(AnchorTask):
    """See AnchorTask."""

    decay = math.exp(-1 / GAMMA)
    network: DFlash

    def loss(self, *batch: mx.array) -> mx.array:
        """With what the confidence head does not know of the shares that are accepted."""
        given = Anchored(*batch)
        states, before = self._states(given)
        entropy, accepted = compared(self._logits(states, before), self._probabilities(given))
        told = mx.stop_gradient(states), mx.stop_gradient(self._embedded(given))
        sure = self.network.confidence_head.logits(*told)
        return self._averaged(given, entropy) + nn.losses.binary_cross_entropy(sure, accepted)

    def draft(self, given: Anchored) -> mx.array:
        return self._logits(*self._states(given))

    def _logits(self, states: mx.array, before: mx.array) -> mx.array:
        network = self.network
        logits = network.own_logits(states[None])[0].astype(mx.float32)
        return (logits + network.markov_head.markov_w2(before))[:, : self._vocabulary]

    def _states(self, given: Anchored) -> tuple[mx.array, mx.array]:
        """(n, width), what the head is given, and (n, rank), what the Markov head's last matrix
        is."""
        states = self._blocks(given)
        blocks = states.reshape(-1, given.slots, states.shape[-1])
        tokens = given.tokens.reshape(-1, given.slots)
        latent, carried = [], None
        for slot in range(given.slots):
            part = slice(slot, slot + 1)
            said, carried = self.network.markov_head.latent(
                tokens[:, part], blocks[:, part], carried
            )
            latent.append(said)
        before = mx.concatenate(latent, axis=1).reshape(*states.shape[:2], -1)
        return given.chosen(states), given.chosen(before)

    def _embedded(self, given: Anchored) -> mx.array:
        """(n, rank): of the tokens before those that are wanted."""
        tokens = given.chosen(given.tokens.reshape(given.tokens.shape[0], -1))
        return self.network.markov_head.markov_w1(tokens)

    def _blocks(self, given: Anchored) -> mx.array:
        """What the last norm puts out, (texts, anchors x slots, width)."""
        network, slots = self.network, given.slots
        first = mx.arange(slots) == 0
        tokens = mx.where(first, given.tokens, network.mask_token)
        tokens = tokens.reshape(tokens.shape[0], -1)
        context = network.context(given.hidden)
        states = mx.stop_gradient(network.embed(tokens))
        for layer, source in zip(network.layers, self._sources(given), strict=True):
            attend = partial(_attend, layer.self_attn, context, given.anchors)
            states = network.through(layer, states, attend, source)
        normed: mx.array = network.norm(states)
        return normed


def _attend(attention: Attention, context: mx.array, anchors: mx.array, rows: mx.array) -> mx.array:
    """Rows (texts, anchors x slots, width) of all blocks."""
    blocks = rows.reshape(anchors.size, -1, rows.shape[-1])
    offsets = anchors.reshape(-1)
    own = attention.keys_values(blocks, offsets)
    queries = attention.queries(blocks, offsets)
    return behind_anchors.attend(attention, queries, attention.keys_values(context), own, anchors)


class Eagle3Task(AnchorTask):
    """See AnchorTask. The first step is made for all rows, since later ones look at them; the
    others behind anchors alone."""

    decay = 0.8
    network: Eagle3

    def draft(self, given: Anchored) -> mx.array:
        heads = mx.stack(self._heads(given), axis=2)
        states = given.chosen(heads.reshape(heads.shape[0], -1, heads.shape[-1]))
        logits = self.network.own_logits(states[None])[0].astype(mx.float32)
        return logits if self._ids is not None else logits[:, : self._vocabulary]

    def _heads(self, given: Anchored) -> list[mx.array]:
        """Of each step what the head is given, (texts, anchors, width)."""
        network = self.network
        sources = self._sources(given)
        seen: list[KeysValues] = []
        made: list[list[KeysValues]] = [[] for _ in network.layers]

        def attend_all(number: int, attention: Attention, rows: mx.array) -> mx.array:
            seen.append(attention.keys_values(rows, 0))
            return attention.attend(attention.queries(rows, 0), *seen[-1], "causal")

        def attend_behind(number: int, attention: Attention, rows: mx.array) -> mx.array:
            # The row before an anchor is the first of its chain.
            offsets = given.anchors.reshape(-1) + len(made[number])
            each = rows.reshape(offsets.size, 1, rows.shape[-1])
            made[number].append(attention.keys_values(each, offsets))
            keys, values = (
                mx.concatenate(list(parts), axis=2) for parts in zip(*made[number], strict=True)
            )
            queries = attention.queries(each, offsets)
            behind = seen[number], (keys, values), given.anchors
            return behind_anchors.attend(attention, queries, *behind)

        features = network.features(given.hidden)
        states = network.through(given.following, features, sources, attend_all)
        states = mx.take_along_axis(states, (given.anchors - 1)[..., None], axis=1)
        heads = [network.norm(states)]
        for step in range(1, given.slots):
            states = network.through(given.tokens[..., step], states, sources, attend_behind)
            heads.append(network.norm(states))
        return heads
