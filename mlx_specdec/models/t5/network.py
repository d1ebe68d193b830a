"""The layers of a T5, with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace

from ..encoder_decoder.context import KeysValues, Network, Source
from ..kv_cache import KVCache
from ..rows import Place
from ..sharding import shard_inputs
from .config import T5Config

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    # nn.relu is compiled, which costs the CPU more than it saves.
    "relu": lambda states: mx.maximum(states, 0),
    "gelu": nn.gelu,
    "silu": nn.silu,
    "gated-relu": lambda states: mx.maximum(states, 0),
    # T5's "gated-gelu" has always meant the tanh approximation.
    "gated-gelu": nn.gelu_approx,
    "gated-silu": nn.silu,
}


class Attention(nn.Module):
    """T5's attention, which does not scale scores."""

    def __init__(self, config: T5Config, *, has_bias: bool) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self._shape = (config.num_heads, config.d_kv)
        for name in "qkv":
            self[name] = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(config.num_buckets, config.num_heads)

    def shard(self, group: mx.distributed.Group) -> None:
        for name in "qkv":
            shard_inplace(self[name], "all-to-sharded", group=group)
        self.o = shard_inputs(self.o, group)
        if "relative_attention_bias" in self:
            # A row of the table belongs to a bucket, a column to a head.
            shard_inplace(self.relative_attention_bias, lambda path, table: 1, group=group)
        heads, width = self._shape
        self._shape = (heads // group.size(), width)

    def queries(self, states: mx.array) -> mx.array:
        """(batch, n, d_model) -> (batch, heads, n, d_kv)."""
        return self._heads(self.q(states))

    def keys_values(self, states: mx.array) -> tuple[mx.array, mx.array]:
        return self._heads(self.k(states)), self._heads(self.v(states))

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
        self.SelfAttention = Attention(config, has_bias=has_bias)
        self.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(self, states: mx.array, mask: mx.array, cache: KVCache | None) -> mx.array:
        normed = self.layer_norm(states)
        queries = self.SelfAttention.queries(normed)
        keys, values = self.SelfAttention.keys_values(normed)
        if cache is not None:
            keys, values = cache.append(keys, values)
        return states + self.SelfAttention(queries, (keys, values), mask)

    def attend_in_parts(
        self, states: mx.array, bias: mx.array, rows: int, hidden: mx.array | None
    ) -> mx.array:
        """The encoder's, (batch, n, d_model): `rows` of the source at a time attend to all of it.
        bias: from `Stack.source_biases`. hidden: added to the scores as well."""
        normed = self.layer_norm(states)
        queries, given = self.SelfAttention.queries(normed), self.SelfAttention.keys_values(normed)
        length, mixed = states.shape[1], []
        for first in range(0, length, rows):
            part = queries[:, :, first : first + rows]
            nearest = bias.shape[-1] - length - first
            mask = bias[:, :, : part.shape[2], nearest : nearest + length]
            mask = mask if hidden is None else mask + hidden
            mixed.append(self.SelfAttention(part, given, mask))
            if length > rows:
                # One after the other, or the scores of all would be in memory together, and an
                # interrupt would wait for all of them.
                mx.eval(mixed[-1])
        return states + mx.concatenate(mixed, axis=1)


class CrossAttentionLayer(nn.Module):
    """Norm, attention to the encoder output, residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.EncDecAttention = Attention(config, has_bias=False)
        self.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(self, states: mx.array, source: KeysValues, mask: mx.array | None) -> mx.array:
        queries = self.EncDecAttention.queries(self.layer_norm(states))
        return states + self.EncDecAttention(queries, source, mask)


class Dense(nn.Module):
    """The feed-forward network, gated or not."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        gated = config.feed_forward.startswith("gated-")
        self._names = ("wi_0", "wi_1") if gated else ("wi",)
        self._act = ACTIVATIONS[config.feed_forward]
        for name in self._names:
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def shard(self, group: mx.distributed.Group) -> None:
        for name in self._names:
            shard_inplace(self[name], "all-to-sharded", group=group)
        self.wo = shard_inputs(self.wo, group)

    def __call__(self, states: mx.array) -> mx.array:
        inner = self._act(self[self._names[0]](states))
        if len(self._names) > 1:
            inner = inner * self[self._names[1]](states)
        return self.wo(inner)


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
        return self.layer[0].SelfAttention


def buckets(distances: np.ndarray, count: int, farthest: int, *, both_ways: bool) -> np.ndarray:
    """The bucket of each distance, key position minus query position: exact when near, logarithmic
    when far (section 2.1). both_ways: the encoder's."""
    result = np.zeros_like(distances)
    if both_ways:
        count //= 2
        result += (distances > 0) * count
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / exact) / np.log(farthest / exact)
    far = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
    return result + np.where(distances < exact, distances, far)


class Stack(nn.Module):
    """Encoder or decoder without embedding and head."""

    def __init__(self, config: T5Config, depth: int, *, is_decoder: bool) -> None:
        super().__init__()
        self._config = config
        self._is_decoder = is_decoder
        self.block = [
            Block(config, has_bias=index == 0 or config.bias_per_layer, is_decoder=is_decoder)
            for index in range(depth)
        ]
        self.final_layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def bias_tables(self, reach: int) -> list[mx.array]:
        """Per layer (heads, width): the score bias of each distance up to `reach`, at column reach
        - 1 + (key - query); the decoder's has `reach` columns of -inf for keys ahead."""
        config = self._config
        ahead = 0 if self._is_decoder else reach - 1
        distances, both = np.arange(1 - reach, ahead + 1), not self._is_decoder
        index = mx.array(
            buckets(distances, config.num_buckets, config.max_distance, both_ways=both)
        )
        tables = []
        for block in self.block if config.bias_per_layer else self.block[:1]:
            table = block.attention.relative_attention_bias(index).T
            if self._is_decoder:
                hidden = mx.full((table.shape[0], reach), -mx.inf, dtype=table.dtype)
                table = mx.concatenate([table, hidden], axis=1)
            tables.append(table)
        return tables

    def source_biases(self, length: int, rows: int) -> list[mx.array]:
        """Per layer of the encoder (1, heads, rows, width): the score bias of a source's last
        `rows` positions; that of earlier ones is a window further on."""
        last = (length - 1) // rows * rows
        reach = last + rows
        keys, queries = np.arange(last + length)[None], np.arange(last, reach)[:, None]
        index = mx.array(reach - 1 + keys - queries)
        biases = [mx.take(table, index, axis=1)[None] for table in self.bias_tables(reach)]
        return self._for_layers(biases)

    def masks(self, tables: Sequence[mx.array], positions: np.ndarray) -> list[mx.array]:
        """Per layer (batch, heads, rows, width): what to add to the scores of new positions (batch,
        rows), `width` being the end of the longest sequence; a batch of 1 for alike ones. tables:
        from `bias_tables`."""
        width, reach = int(positions.max()) + 1, tables[0].shape[1] // 2
        if positions.size == 1:
            first = reach - width
            masks = [table[None, :, None, first : first + width] for table in tables]
        else:
            index = mx.array(reach - 1 + np.arange(width) - positions[..., None])
            masks = [mx.take(table, index, axis=1).swapaxes(0, 1) for table in tables]
        return self._for_layers(masks)

    def _for_layers(self, arrays: list[mx.array]) -> list[mx.array]:
        return arrays * (len(self.block) // len(arrays))


SOURCE_ROWS = 512
"""Of a source, that attend in one pass: what a longer one takes then grows with its length alone,
not with its square."""


class T5(Network):
    """The whole model."""

    model_type = "t5"

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.vocabulary, self.width = config.vocab_size, config.d_model
        self.start = (config.decoder_start_token_id,)
        self.trained_length = config.trained_length
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, config.num_layers, is_decoder=False)
        self.decoder = Stack(config, config.num_decoder_layers, is_decoder=True)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.decoder.block)

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.decoder.final_layer_norm.weight.dtype

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's heads and its part of the feed-forward networks, lazily; `config` is
        then of that part. Raises OptionError where quantized groups cannot be divided."""
        config, ranks = self.config, group.size()
        for module in list(self.modules()):
            if isinstance(module, Attention | Dense):
                module.shard(group)
        self.config = replace(
            config, num_heads=config.num_heads // ranks, d_ff=config.d_ff // ranks
        )

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        length = tokens.shape[1]
        parts = -(-length // SOURCE_ROWS)
        rows = -(-length // parts)
        biases = self.encoder.source_biases(length, rows)
        hidden = _hide(mask, biases[0].dtype)
        states = self.shared(tokens)
        for block, bias in zip(self.encoder.block, biases, strict=True):
            attend, feed_forward = block.layer
            states = feed_forward(attend.attend_in_parts(states, bias, rows, hidden))
        return self.encoder.final_layer_norm(states)

    def source_nbytes(self, length: int) -> int:
        config = self.config
        scores = 5 * config.num_heads * min(length, SOURCE_ROWS)
        states = 6 * config.d_model + 3 * config.d_ff
        return length * (scores + states + self.row) * self.dtype.size

    @property
    def row(self) -> int:
        return 2 * self.config.num_decoder_layers * self.config.num_heads * self.config.d_kv

    def project_encoded(self, encoded: mx.array) -> list[KeysValues]:
        # Every later pass would copy a transposed view.
        attentions = (block.layer[1].EncDecAttention for block in self.decoder.block)
        return [tuple(map(mx.contiguous, each.keys_values(encoded))) for each in attentions]

    def tables(self, reach: int) -> list[mx.array]:
        return self.decoder.bias_tables(reach)

    def decode(
        self,
        tokens: mx.array,
        caches: Sequence[KVCache],
        source: Source,
        place: Place,
        tables: Sequence[mx.array],
        outputs: list[mx.array] | None = None,
    ) -> mx.array:
        masks = self.decoder.masks(tables, place.positions[:1] if place.even else place.positions)
        states = self.shared(tokens)
        hidden = _hide(source.mask, states.dtype)
        for block, cache, given, mask in zip(
            self.decoder.block, caches, source.projected, masks, strict=True
        ):
            attend, cross, feed_forward = block.layer
            states = feed_forward(cross(attend(states, mask, cache), given, hidden))
            if outputs is not None:
                outputs.append(states)
        states = self.decoder.final_layer_norm(states)
        return states * self.config.d_model**-0.5 if self.config.scales_output else states

    def embed(self, tokens: mx.array) -> mx.array:
        return self.shared(tokens)

    def head(self, states: mx.array) -> mx.array:
        return self.lm_head(states) if self.config.own_head else self.shared.as_linear(states)


def _hide(mask: mx.array | None, dtype: mx.Dtype) -> mx.array | None:
    """(batch, n) bool -> (batch, 1, 1, n), 0 where True and -inf where False."""
    if mask is None:
        return None
    return mx.where(mask, 0.0, -mx.inf).astype(dtype)[:, None, None]
