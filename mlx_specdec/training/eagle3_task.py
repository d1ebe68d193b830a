"""EAGLE-3's task: chains behind anchors, in which the drafter is fed what it made itself.

Source: Li et al., arXiv 2503.01840, section 3.1 (training-time test).
"""

from __future__ import annotations

import mlx.core as mx

from ..models.speculators.eagle3 import Eagle3
from ..models.speculators.layers import Attention
from . import behind_anchors
from .anchors import Anchored, AnchorTask
from .behind_anchors import KeysValues


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
