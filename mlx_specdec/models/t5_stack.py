"""The encoder or the decoder of a T5, and its relative positions."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .t5_config import T5Config
from .t5_layers import Block


def buckets(distances: np.ndarray, count: int, farthest: int, *, both_ways: bool) -> np.ndarray:
    """The bucket of each distance: exact when near, logarithmic when far (section 2.1).

    distances: key position minus query position. both_ways: the encoder, which also looks ahead.
    """
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
        """Per layer (heads, width): the score bias of each distance up to `reach`, -inf behind.

        Encoder: column reach - 1 + (key - query). Decoder: column reach - 1 - (query - key), and
        `reach` columns of -inf for keys that lie ahead.
        """
        config = self._config
        ahead = 0 if self._is_decoder else reach - 1
        distances = np.arange(1 - reach, ahead + 1)
        index = mx.array(
            buckets(
                distances,
                config.num_buckets,
                config.max_distance,
                both_ways=not self._is_decoder,
            )
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
        `rows` positions, with more keys behind it: of those before them it is a window further on.

        Layers that share a bias share the array.
        """
        last = (length - 1) // rows * rows
        reach = last + rows
        keys, queries = np.arange(last + length)[None], np.arange(last, reach)[:, None]
        index = mx.array(reach - 1 + keys - queries)
        biases = [mx.take(table, index, axis=1)[None] for table in self.bias_tables(reach)]
        return biases * (len(self.block) // len(biases))

    def masks(
        self, tables: Sequence[mx.array], reach: int, start: int, rows: int
    ) -> list[mx.array]:
        """Per layer (1, heads, rows, start + rows): what is added to the scores of new positions.

        Layers that share a bias share the array.
        """
        width = start + rows
        if rows == 1:
            first = reach - 1 - start
            masks = [table[None, :, None, first : first + width] for table in tables]
        else:
            keys, queries = np.arange(width)[None], np.arange(start, width)[:, None]
            index = mx.array(reach - 1 + keys - queries)
            masks = [mx.take(table, index, axis=1)[None] for table in tables]
        return masks * (len(self.block) // len(masks))

    def uneven_masks(
        self, tables: Sequence[mx.array], reach: int, positions: np.ndarray, width: int
    ) -> list[mx.array]:
        """As `masks`, (batch, heads, rows, width), for positions (batch, rows) of many sequences,
        `width` being the end of the longest one."""
        keys, queries = np.arange(width), positions[..., None]
        index = mx.array(reach - 1 + keys - queries)
        masks = [mx.take(table, index, axis=1).swapaxes(0, 1) for table in tables]
        return masks * (len(self.block) // len(masks))
