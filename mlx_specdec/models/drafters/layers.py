"""YaRN: positions of texts longer than those that were learned from, as transformers turns them.

mlx-lm's takes neither `attention_factor` nor `truncate`, which gpt-oss has.
Source: Peng et al., arXiv 2309.00071, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .sizes import ENCODER_ATTENTION, LayerSizes

FAST, SLOW = 32, 1
"""Turns within the texts that were learned from: a pair that makes more of them goes on as it did,
one that makes fewer slows down by the whole factor."""


def yarn(sizes: LayerSizes, told: Mapping[str, Any]) -> Callable[..., mx.array]:
    """The rotation of (batch, heads, m, head_dim), called with `offset`. told: of the positions, as
    config.json has it."""
    periods = mx.array(_periods(sizes, told), dtype=mx.float32)
    size = _size(told)

    def turned(heads: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            heads if size == 1 else heads * size,
            sizes.head_dim,
            traditional=sizes.interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )

    return turned


def _periods(sizes: LayerSizes, told: Mapping[str, Any]) -> np.ndarray:
    """Of each pair, in positions and turns of 1 radian."""
    learned = told.get("original_max_position_embeddings") or sizes.max_positions
    pairs = sizes.head_dim // 2

    def pair(turns: float) -> float:
        """That makes so many turns in a text, which need not be a whole number."""
        return pairs * math.log(learned / (turns * 2 * math.pi)) / math.log(sizes.rope_theta)

    low, high = pair(told.get("beta_fast") or FAST), pair(told.get("beta_slow") or SLOW)
    if told.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, sizes.head_dim - 1)
    slowed = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    plain = sizes.rope_theta ** (np.arange(pairs) / pairs)
    return 1 / (slowed / (told["factor"] * plain) + (1 - slowed) / plain)


def _size(told: Mapping[str, Any]) -> float:
    """What queries and keys are multiplied by."""
    if (asked := told.get("attention_factor")) is not None:
        return float(asked)

    def grown(share: float) -> float:
        return 1.0 if told["factor"] <= 1 else 0.1 * share * math.log(told["factor"]) + 1

    both = told.get("mscale"), told.get("mscale_all_dim")
    return grown(both[0]) / grown(both[1]) if both[0] and both[1] else grown(1)


class Source(NamedTuple):
    """What the target's encoder made of source texts, as one layer attends to it.

    keys, values: (batch, kv_heads, n, head_dim). mask: (batch, 1, 1, n) bool, False for padding;
    None where there is none.
    """

    keys: mx.array
    values: mx.array
    mask: mx.array | None = None


def rope_of(sizes: LayerSizes) -> Callable[..., mx.array]:
    """The rotation of positions, called with `offset`. Most scaled ones are mlx-lm's."""
    told = sizes.rope_scaling
    if told is None:
        return nn.RoPE(sizes.head_dim, traditional=sizes.interleaved, base=sizes.rope_theta)
    if "yarn" in (told.get("rope_type"), told.get("type")):
        return yarn(sizes, told)
    from mlx_lm.models.rope_utils import initialize_rope

    scaled: Callable[..., mx.array] = initialize_rope(
        sizes.head_dim,
        sizes.rope_theta,
        sizes.interleaved,
        {"original_max_position_embeddings": sizes.max_positions, **told},
        sizes.max_positions,
    )
    return scaled


class Linears:
    """Makes the linear layers of a module: those have a bias whose file has one.

    present: names of all tensors. path: of the module.
    """

    def __init__(self, present: Collection[str], path: str) -> None:
        self._present = present
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this module."""
        return f"{self._path}.{name}" in self._present

    def linear(self, name: str, inputs: int, outputs: int) -> nn.Linear:
        """A layer of the module."""
        return nn.Linear(inputs, outputs, bias=self.has(f"{name}.bias"))


class Attention(nn.Module):
    """inputs: width of what queries, keys and values are made of. source: width of what keys and
    values are made of, where that is the encoder's output, whose positions are not turned."""

    def __init__(
        self, sizes: LayerSizes, inputs: int, make: Linears, source: int | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._rope = rope_of(sizes) if source is None else None
        inner, outer = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = make.linear("q_proj", inputs, inner)
        self.k_proj = make.linear("k_proj", source or inputs, outer)
        self.v_proj = make.linear("v_proj", source or inputs, outer)
        self.o_proj = make.linear("o_proj", inner, sizes.width)
        if make.has("q_norm.weight"):
            self.q_norm = nn.RMSNorm(sizes.head_dim, sizes.eps)
        if make.has("k_norm.weight"):
            self.k_norm = nn.RMSNorm(sizes.head_dim, sizes.eps)

    def queries(self, rows: mx.array, offset: int | mx.array = 0) -> mx.array:
        """(1, m, inputs), the first at position `offset` -> (1, heads, m, head_dim); of many
        sequences, each at its own offset, (batch,) int32."""
        return self._placed(self.q_proj(rows), "q_norm", offset)

    def keys_values(self, rows: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array]:
        """The same of (1, kv_heads, m, head_dim) keys, and values."""
        keys = self._placed(self.k_proj(rows), "k_norm", offset)
        return keys, self._by_head(self.v_proj(rows)).swapaxes(1, 2)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """-> (1, m, width)."""
        scale = self._sizes.head_dim**-0.5
        seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return self.o_proj(seen.swapaxes(1, 2).flatten(2))

    def _placed(self, rows: mx.array, norm: str, offset: int | mx.array) -> mx.array:
        by_head = self._by_head(rows)
        if norm in self:
            by_head = self[norm](by_head)
        heads = by_head.swapaxes(1, 2)
        return heads if self._rope is None else self._rope(heads, offset=offset)

    def _by_head(self, rows: mx.array) -> mx.array:
        return rows.reshape(*rows.shape[:2], -1, self._sizes.head_dim)


class FeedForward(nn.Module):
    """The gated network behind the attention."""

    def __init__(self, sizes: LayerSizes, make: Linears) -> None:
        super().__init__()
        self.gate_proj = make.linear("gate_proj", sizes.width, sizes.intermediate)
        self.up_proj = make.linear("up_proj", sizes.width, sizes.intermediate)
        self.down_proj = make.linear("down_proj", sizes.intermediate, sizes.width)

    def __call__(self, rows: mx.array) -> mx.array:
        """(1, m, width) -> (1, m, width)."""
        return self.down_proj(nn.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One layer. inputs: see `Attention`. number: of the layer in the file."""

    def __init__(self, sizes: LayerSizes, number: int, inputs: int, present: Collection[str]):
        super().__init__()
        path = f"layers.{number}"
        if f"{path}.input_layernorm.weight" in present:
            self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes, inputs, Linears(present, f"{path}.self_attn"))
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes, Linears(present, f"{path}.mlp"))
        if sizes.encoder_width is not None:
            make = Linears(present, f"{path}.{ENCODER_ATTENTION}")
            self.encoder_attn = Attention(sizes, sizes.width, make, source=sizes.encoder_width)
            self.encoder_attn_layernorm = nn.RMSNorm(sizes.width, sizes.eps)

    def finish(self, rows: mx.array, attended: mx.array, source: Source | None = None) -> mx.array:
        """What comes behind the attention: (batch, m, width) of both -> (batch, m, width).

        source: from `Speculator.sources`, one per sequence."""
        rows = self.look_at(source, rows + attended)
        return rows + self.mlp(self.post_attention_layernorm(rows))

    def look_at(self, source: Source | None, rows: mx.array) -> mx.array:
        """Rows (batch, m, width) with what they see of the source; themselves in layers that do not
        attend to it."""
        if ENCODER_ATTENTION not in self:
            return rows
        assert source is not None, "the layer attends to a source"
        queries = self.encoder_attn.queries(self.encoder_attn_layernorm(rows))
        return rows + self.encoder_attn.attend(queries, *source)
