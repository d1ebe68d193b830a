"""The layers of a T5, with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace

from .joined import Joined
from .kv_cache import KVCache
from .sharding import shard_inputs, shard_outputs
from .t5_config import T5Config

KeysValues = Sequence[mx.array]
"""Two, (batch, heads, n, d_kv) each."""


def relu(states: mx.array) -> mx.array:
    """max(x, 0); MLX's own is compiled, which costs the CPU more than it saves."""
    return mx.maximum(states, 0)


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "gated-relu": relu,
    # T5's "gated-gelu" has always meant the tanh approximation.
    "gated-gelu": nn.gelu_approx,
    "gated-silu": nn.silu,
}


class Attention(Joined):
    """Attention without scaling of the scores, as T5 has it.

    reads: which of "q", "k" and "v" read the same states.
    """

    def __init__(self, config: T5Config, reads: str, *, has_bias: bool) -> None:
        super().__init__(reads)
        inner = config.num_heads * config.d_kv
        self._shape = (config.num_heads, config.d_kv)
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(config.num_buckets, config.num_heads)

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep the heads of this rank; what all ranks' heads give is added up."""
        shard_outputs(self.q, group)
        shard_outputs(self.k, group)
        shard_outputs(self.v, group)
        self.o = shard_inputs(self.o, group)
        if "relative_attention_bias" in self:
            # A row of the table belongs to a bucket, a column to a head.
            shard_inplace(self.relative_attention_bias, lambda path, table: 1, group=group)
        heads, width = self._shape
        self._shape = (heads // group.size(), width)

    def project(self, states: mx.array) -> list[mx.array]:
        """(batch, n, d_model) -> of each that reads them (batch, heads, n, d_kv)."""
        return [self._heads(flat) for flat in self.together(states)]

    def queries(self, states: mx.array) -> mx.array:
        """As `project`, of "q" alone."""
        return self._heads(self.q(states))

    def __call__(self, queries: mx.array, given: KeysValues, mask: mx.array | None) -> mx.array:
        """Attend from (batch, heads, m, d_kv) to given keys and values; mask is added to the
        scores. Returns (batch, m, d_model)."""
        mixed = mx.fast.scaled_dot_product_attention(queries, *given, scale=1.0, mask=mask)
        batch, _, rows, _ = mixed.shape
        if rows > 1:
            mixed = mixed.transpose(0, 2, 1, 3)
        return self.o(mixed.reshape(batch, rows, -1))

    def _heads(self, flat: mx.array) -> mx.array:
        batch, rows, _ = flat.shape
        if rows == 1:
            # One row lies the same either way, and plain decoding is nothing but single rows.
            heads, width = self._shape
            return flat.reshape(batch, heads, 1, width)
        return flat.reshape(batch, rows, *self._shape).transpose(0, 2, 1, 3)


class SelfAttentionLayer(nn.Module):
    """Norm, self-attention, residual."""

    def __init__(self, config: T5Config, *, has_bias: bool) -> None:
        super().__init__()
        self.SelfAttention = Attention(config, "qkv", has_bias=has_bias)
        self.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(self, states: mx.array, mask: mx.array, cache: KVCache | None) -> mx.array:
        queries, keys, values = self.SelfAttention.project(self.layer_norm(states))
        if cache is not None:
            keys, values = cache.append(keys, values)
        return states + self.SelfAttention(queries, (keys, values), mask)

    def attend_in_parts(
        self, states: mx.array, bias: mx.array, rows: int, hidden: mx.array | None
    ) -> mx.array:
        """The encoder's, (batch, n, d_model): `rows` of the source at a time attend to all of it.

        bias: from `Stack.source_biases`. hidden: added to the scores as well.
        """
        queries, *given = self.SelfAttention.project(self.layer_norm(states))
        length, mixed = states.shape[1], []
        for first in range(0, length, rows):
            part = queries[:, :, first : first + rows]
            nearest = bias.shape[-1] - length - first
            mask = bias[:, :, : part.shape[2], nearest : nearest + length]
            mask = mask if hidden is None else mask + hidden
            mixed.append(self.SelfAttention(part, given, mask))
            if length > rows:
                # One after the other, or the scores of all would be in memory together; and
                # nobody can interrupt what is computed in one piece.
                mx.eval(mixed[-1])
        return states + mx.concatenate(mixed, axis=1)


class CrossAttentionLayer(nn.Module):
    """Norm, attention to the encoder output, residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.EncDecAttention = Attention(config, "kv", has_bias=False)
        self.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(self, states: mx.array, source: KeysValues, mask: mx.array | None) -> mx.array:
        queries = self.EncDecAttention.queries(self.layer_norm(states))
        return states + self.EncDecAttention(queries, source, mask)


class Dense(Joined):
    """The feed-forward network, gated or not."""

    def __init__(self, config: T5Config) -> None:
        gated = config.feed_forward.startswith("gated-")
        names = ("wi_0", "wi_1") if gated else ("wi",)
        super().__init__(names)
        self._act = ACTIVATIONS[config.feed_forward]
        for name in names:
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's part of what lies between; what all parts give is added up."""
        for name in self._names:
            shard_outputs(self[name], group)
        self.wo = shard_inputs(self.wo, group)

    def __call__(self, states: mx.array) -> mx.array:
        first, *gate = self.together(states)
        inner = self._act(first)
        return self.wo(inner * gate[0] if gate else inner)


class FeedForwardLayer(nn.Module):
    """Norm, feed-forward, residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.DenseReluDense = Dense(config)
        self.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(self, states: mx.array) -> mx.array:
        return states + self.DenseReluDense(self.layer_norm(states))


class Block(nn.Module):
    """One layer of a stack; `layer` is numbered as in the checkpoints."""

    def __init__(self, config: T5Config, *, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        self.layer: list[Any] = [SelfAttentionLayer(config, has_bias=has_bias)]
        if is_decoder:
            self.layer.append(CrossAttentionLayer(config))
        self.layer.append(FeedForwardLayer(config))

    @property
    def attention(self) -> Attention:
        """The self-attention."""
        return self.layer[0].SelfAttention
