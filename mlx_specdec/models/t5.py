"""T5 and its variants (v1.0, v1.1, Flan, mT5, UMT5): the arithmetic, with Hugging Face's names.

Sources: Raffel et al., arXiv 1910.10683; Xue et al., arXiv 2010.11934 (mT5); Chung et al., arXiv
2304.09151 (UMT5). The output head and the scaling before it are two separate facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .joined import Joined
from .kv_cache import STEP, KVCache
from .t5_config import T5Config
from .t5_layers import Attention, Dense, KeysValues
from .t5_stack import Stack

SOURCE_ROWS = 512
"""Of a source, that attend in one pass: what a longer one takes then grows with its length alone,
not with its square."""


class T5(nn.Module):
    """The whole model. Parameters are named as in Hugging Face checkpoints."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, config.num_layers, is_decoder=False)
        self.decoder = Stack(config, config.num_decoder_layers, is_decoder=True)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's heads and its part of the feed-forward networks, lazily, before `join`;
        `config` is then of that part. A layer of the encoder adds up over all ranks twice, one of
        the decoder three times. Raises OptionError where the ranks' parts are not alike."""
        config, ranks = self.config, group.size()
        config.check_shares(ranks)
        for module in list(self.modules()):
            if isinstance(module, Attention | Dense):
                module.shard(group)
        self.config = replace(
            config, num_heads=config.num_heads // ranks, d_ff=config.d_ff // ranks
        )

    def join(self) -> None:
        """One product in the place of those that read the same states; layer by layer, so that it
        takes no more than a layer's weights beside them all."""
        for module in self.modules():
            if isinstance(module, Joined):
                module.join()
                mx.clear_cache()  # MLX keeps what the parts were in for others of their size.

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        """The encoder output.

        tokens: (batch, n) int32. mask: (batch, n) bool, False for padding. Returns
        (batch, n, d_model).
        """
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
        """About what `encode` and `project_encoded` take for a source: bias, scores and their
        softmax of as many rows as attend at a time, and what a layer hands on."""
        config = self.config
        scores = 5 * config.num_heads * min(length, SOURCE_ROWS)
        states = 6 * config.d_model + 3 * config.d_ff
        kept = 2 * config.num_decoder_layers * config.num_heads * config.d_kv
        return length * (scores + states + kept) * self.encoder.final_layer_norm.weight.dtype.size

    def cache_nbytes(self, source: int, columns: int) -> int:
        """Of the encoder's output, of its keys and values in each decoder layer, and of those of
        `columns` positions of the decoder, in whole steps."""
        config, number = self.config, self.encoder.final_layer_norm.weight.dtype.size
        row = 2 * config.num_decoder_layers * config.num_heads * config.d_kv
        return number * (source * (config.d_model + row) + -(-columns // STEP) * STEP * row)

    def project_encoded(self, encoded: mx.array) -> list[KeysValues]:
        """Per decoder layer the cross-attention's keys and values, (batch, heads, n, d_kv).

        Laid out once in that order: every later pass would copy a transposed view.
        """
        given = (block.layer[1].EncDecAttention.project(encoded) for block in self.decoder.block)
        return [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in given]

    def decode(
        self,
        tokens: mx.array,
        caches: Sequence[KVCache | None],
        source: Sequence[KeysValues],
        masks: Sequence[mx.array],
        source_mask: mx.array | None = None,
        outputs: list[mx.array] | None = None,
    ) -> mx.array:
        """What the head is given: (batch, m, d_model), normed and scaled.

        tokens: (batch, m) int32, the next positions after what the caches hold; without caches, the
        first. source: from `project_encoded`. masks: from `Stack.masks`. source_mask: (batch, n)
        bool, False for the source's padding. outputs: is given what each layer puts out.
        """
        states = self.shared(tokens)
        hidden = _hide(source_mask, states.dtype)
        layers = zip(self.decoder.block, caches, source, masks, strict=True)
        for block, cache, given, mask in layers:
            attend, cross, feed_forward = block.layer
            states = feed_forward(cross(attend(states, mask, cache), given, hidden))
            if outputs is not None:
                outputs.append(states)
        states = self.decoder.final_layer_norm(states)
        return states * self.config.d_model**-0.5 if self.config.scales_output else states

    def head(self, states: mx.array) -> mx.array:
        """(batch, m, d_model) -> logits (batch, m, vocabulary)."""
        return self.lm_head(states) if self.config.own_head else self.shared.as_linear(states)


def _hide(mask: mx.array | None, dtype: mx.Dtype) -> mx.array | None:
    """(batch, n) bool -> (batch, 1, 1, n), 0 where True and -inf where False."""
    if mask is None:
        return None
    return mx.where(mask, 0.0, -mx.inf).astype(dtype)[:, None, None]
