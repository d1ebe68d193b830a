"""Gemma 4's assistants: layers that have no keys and values, but look at the target's.

They guess token by token from one place, the newest token's. Layers with a window look at what the
target's last layer with one has made, the others at what its last layer without has. The layers
are mlx-lm's. Source: transformers' gemma4_assistant.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from ...checkpoints.speculators.gemma4_assistant import FULL, SLIDING, AssistantFiles
from ...contracts import FINAL, keys_of, values_of
from ...errors import CheckpointError
from ..base import Base
from .speculator import Reading, Speculator


class Lender:
    """A layer of the target that lends its keys and values.

    number: of the layer. window: how many tokens it looks back, its own included; None without end.
    """

    def __init__(self, number: int, attention: Any, window: int | None) -> None:
        self.taps = (keys_of(number), values_of(number))
        self.heads, self.head_dim = attention.n_kv_heads, attention.head_dim
        self._window = window
        self._rope = attention.rope

    @property
    def width(self) -> int:
        """Of its keys, and of its values."""
        return int(self.heads * self.head_dim)

    def first(self, place: int) -> int:
        """The first token that one at `place` looks at."""
        return 0 if self._window is None else max(0, place + 1 - self._window)

    def keys(self, rows: mx.array, offset: int) -> mx.array:
        """(1, m, width), the first at position `offset` -> (1, heads, m, head_dim)."""
        turned: mx.array = self._rope(self.values(rows), offset=offset)
        return turned

    def values(self, rows: mx.array) -> mx.array:
        """(1, m, width) -> (1, heads, m, head_dim)."""
        return rows.reshape(*rows.shape[:2], self.heads, self.head_dim).swapaxes(1, 2)


class MaskedEmbedding(nn.Module):
    """Finds the tokens that are worth a look: those of the likeliest clusters."""

    def __init__(self, files: AssistantFiles, clusters: mx.array) -> None:
        super().__init__()
        self.centroids = nn.Linear(files.sizes.width, len(clusters), bias=False)
        self._clusters, self._top_k = clusters, files.top_k

    def tokens(self, states: mx.array) -> mx.array:
        """(1, m, width) -> (1, m, tokens) int32."""
        scores = self.centroids(states)
        best = mx.argpartition(-scores, self._top_k - 1, axis=-1)[..., : self._top_k]
        return self._clusters[best].flatten(2)


class Assistant(Speculator):
    """The network of a directory."""

    def __init__(self, files: AssistantFiles, target: Base) -> None:
        super().__init__(files, target)
        args = _args(files)
        self.layers = [DecoderLayer(args, number) for number in range(files.sizes.count)]
        self.post_projection = nn.Linear(files.sizes.width, files.target_width, bias=False)
        # Rows of it are looked up, of tokens that are worth it.
        self.lm_head = nn.Embedding(files.vocabulary, files.sizes.width)
        if files.clusters is not None:
            self.masked_embedding = MaskedEmbedding(files, files.clusters)
        self._attentions = files.attentions
        self._lenders = {each: _lender(each, files, target) for each in files.head_dims}
        self.taps = (FINAL, *(tap for each in self._lenders.values() for tap in each.taps))

    @property
    def most(self) -> int:
        """A chain has no end of its own."""
        return sys.maxsize

    @property
    def lenders(self) -> dict[str, Lender]:
        """By the kind of attention."""
        return self._lenders

    def width_of(self, tap: str) -> int:
        """As Speculator says."""
        lent = (each.width for each in self._lenders.values() if tap in each.taps)
        return next(lent, super().width_of(tap))

    def apart(self, hidden: mx.array) -> list[mx.array]:
        """What stands side by side, tap by tap."""
        ends = list(accumulate(map(self.width_of, self.taps)))
        return list(mx.split(hidden, ends[:-1], axis=-1))

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return AssistantReading(self)

    def step(
        self, token: mx.array, state: mx.array, lent: dict[str, Any], position: int
    ) -> tuple[mx.array, mx.array]:
        """(1, 1) int32, and the state before it, (1, 1, target's width), -> what the head is given,
        and the next state. lent: keys and values for each kind of attention."""
        states = self.fc(mx.concatenate([self.embed(token), state], axis=-1))
        for layer, attention in zip(self.layers, self._attentions, strict=True):
            states, *_ = layer(states, shared_kv=lent[attention], offset=position)
        states = self.norm(states)
        return states, self.post_projection(states)

    def own_logits(self, states: mx.array) -> mx.array:
        """As Speculator says; tokens of clusters that are not looked at get -inf."""
        if "masked_embedding" not in self:
            logits: mx.array = self.lm_head.as_linear(states)
            return logits
        tokens = self.masked_embedding.tokens(states)
        scores = (self.lm_head(tokens) @ states[..., None])[..., 0]
        shape = (*states.shape[:2], self._target.vocabulary)
        nothing = mx.full(shape, -mx.inf, dtype=scores.dtype)
        return mx.put_along_axis(nothing, tokens, scores, axis=-1)


class AssistantReading(Reading):
    """One sequence: the target's keys and values, and the state of its newest token. What is
    guessed leaves nothing behind."""

    def __init__(self, network: Assistant) -> None:
        super().__init__(len(network.lenders))
        self._network = network
        self._newest: tuple[mx.array, mx.array] | None = None
        self._guessed: mx.array | None = None

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As drafting.speculator.Reading says."""
        network = self._network
        offset = self._rows.advance(following, 0).starts[0]
        final, *lent = network.apart(hidden.astype(network.dtype))
        lenders = zip(network.lenders.values(), lent[::2], lent[1::2], self._caches, strict=True)
        for lender, keys, values, cache in lenders:
            cache.append(lender.keys(keys, offset), lender.values(values))
        self._newest = following[:, -1:], final[:, -1:]

    def guess(self, count: int) -> mx.array:
        """As drafting.speculator.Reading says."""
        assert self._newest is not None, "something was read"
        token, self._guessed = self._newest
        return self.guess_after(token)

    def guess_after(self, token: mx.array) -> mx.array:
        """As drafting.speculator.Reading says."""
        assert self._guessed is not None, "a first token was guessed"
        network, place = self._network, self.length
        lenders = zip(network.lenders.items(), self._caches, strict=True)
        lent = {kind: cache.columns(lender.first(place)) for (kind, lender), cache in lenders}
        states, self._guessed = network.step(token, self._guessed, lent, place)
        return network.own_logits(states)


def _lender(attention: str, files: AssistantFiles, target: Base) -> Lender:
    """The last layer of the target with such keys and values of its own. Raises CheckpointError
    where there is none, or where its heads are of another size."""
    layers = enumerate(getattr(target.network, "layers", ()))
    own = [
        (number, layer.self_attn)
        for number, layer in layers
        if getattr(layer, "layer_type", None) == attention and layer.self_attn.has_kv
    ]
    if not own:
        raise CheckpointError(
            f"{files.directory} is an assistant of Gemma 4, and the target has no {attention} to "
            "lend it: the drafter belongs to another target"
        )
    number, theirs = own[-1]
    size = files.head_dims[attention]
    if theirs.head_dim != size or files.sizes.heads % theirs.n_kv_heads:
        raise CheckpointError(
            f"{files.directory} has {files.sizes.heads} heads of width {size} in its {attention}, "
            f"and the target {theirs.n_kv_heads} of width {theirs.head_dim}: the drafter belongs "
            "to another target"
        )
    return Lender(number, theirs, files.window if attention == SLIDING else None)


def _args(files: AssistantFiles) -> ModelArgs:
    """What mlx-lm's layers are made from: all of them have their keys and values from elsewhere."""
    sizes = files.sizes
    return ModelArgs(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.count,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        head_dim=files.head_dims.get(SLIDING, 1),
        global_head_dim=files.head_dims.get(FULL, 1),
        rms_norm_eps=sizes.eps,
        vocab_size=files.vocabulary,
        num_key_value_heads=sizes.kv_heads,
        num_kv_shared_layers=sizes.count,
        hidden_size_per_layer_input=0,
        rope_parameters={kind: dict(each) for kind, each in files.positions.items()},
        sliding_window=files.window,
        max_position_embeddings=sizes.max_positions,
        use_double_wide_mlp=False,
        layer_types=list(files.attentions),
    )


network = Assistant
