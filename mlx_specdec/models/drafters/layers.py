"""The transformer layers of drafters, and their rotary position embeddings."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv_cache import KVCache
from .files import ENCODER_ATTENTION, LayerSizes

Names = Collection[str]
"""Names of all tensors of a drafter. A layer has a bias or a norm only if its name is listed."""
BETA_FAST, BETA_SLOW = 32, 1
"""YaRN's defaults, in rotations within the original context length. A pair of entries that rotates
more often than BETA_FAST is not scaled; one that rotates less than BETA_SLOW is scaled fully."""


def rope_of(sizes: LayerSizes) -> Callable[..., mx.array]:
    """Return a function that rotates (batch, heads, m, head_dim) from position `offset` on."""
    scaling = sizes.rope_scaling
    if scaling is None:
        return nn.RoPE(sizes.head_dim, traditional=sizes.interleaved, base=sizes.rope_theta)
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        return yarn(sizes, scaling)
    from mlx_lm.models.rope_utils import initialize_rope

    scaled: Callable[..., mx.array] = initialize_rope(
        sizes.head_dim,
        sizes.rope_theta,
        sizes.interleaved,
        {"original_max_position_embeddings": sizes.max_positions, **scaling},
        sizes.max_positions,
    )
    return scaled


def yarn(sizes: LayerSizes, scaling: Mapping[str, Any]) -> Callable[..., mx.array]:
    """Return YaRN's rotation as transformers computes it. mlx-lm's version ignores
    `attention_factor` and `truncate`, which gpt-oss sets. Source: Peng et al., arXiv 2309.00071,
    section 3.2."""
    original = scaling.get("original_max_position_embeddings") or sizes.max_positions
    factor, pairs = scaling["factor"], sizes.head_dim // 2

    def pair(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(sizes.rope_theta)

    low = pair(scaling.get("beta_fast") or BETA_FAST)
    high = pair(scaling.get("beta_slow") or BETA_SLOW)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, sizes.head_dim - 1)
    scaled = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    plain = sizes.rope_theta ** (np.arange(pairs) / pairs)
    # The unit is positions per radian.
    periods = mx.array(1 / (scaled / (factor * plain) + (1 - scaled) / plain), dtype=mx.float32)

    def mscale(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1

    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    usual = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)
    gain = float(scaling.get("attention_factor") or usual)

    def rotate(heads: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            heads if gain == 1 else heads * gain,
            sizes.head_dim,
            traditional=sizes.interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )

    return rotate


class SourceKeysValues(NamedTuple):
    """One layer's keys and values of the encoder's output, (batch, kv_heads, n, head_dim) each.

    Attributes:
        mask: (batch, 1, 1, n) bool, False for padding; None without padding.
    """

    keys: mx.array
    values: mx.array
    mask: mx.array | None = None


def linear(present: Names, path: str, inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=f"{path}.bias" in present)


class Attention(nn.Module):
    """Attention with grouped heads and rotary positions.

    Args:
        sizes: The sizes of the layer.
        inputs: Width of the states from which queries, keys and values are computed.
        present: Names of all tensors of the drafter.
        path: Name of this attention among the tensors.
        source: Width of the encoder's output, for attention to the encoder. Its keys and values
            are computed from that output, and positions are not rotated.
    """

    def __init__(
        self, sizes: LayerSizes, inputs: int, present: Names, path: str, source: int | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._rope = rope_of(sizes) if source is None else None
        inner, outer = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = linear(present, f"{path}.q_proj", inputs, inner)
        self.k_proj = linear(present, f"{path}.k_proj", source or inputs, outer)
        self.v_proj = linear(present, f"{path}.v_proj", source or inputs, outer)
        self.o_proj = linear(present, f"{path}.o_proj", inner, sizes.width)
        for name in ("q_norm", "k_norm"):
            if f"{path}.{name}.weight" in present:
                self[name] = nn.RMSNorm(sizes.head_dim, sizes.eps)

    def queries(self, rows: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Return the queries, (1, heads, m, head_dim), of rows, (1, m, inputs), whose first is at
        position `offset`."""
        return self._placed(self.q_proj(rows), "q_norm", offset)

    def keys_values(self, rows: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array]:
        """Return keys and values, (1, kv_heads, m, head_dim) each; arguments as in `queries`."""
        keys = self._placed(self.k_proj(rows), "k_norm", offset)
        return keys, self._by_head(self.v_proj(rows)).swapaxes(1, 2)

    def step(
        self, rows: mx.array, cache: KVCache, offset: int, mask: mx.array | str | None
    ) -> mx.array:
        """Add rows, (1, m, inputs), whose first is at position `offset`, to a cache, and attend
        from them to all rows of the cache."""
        queries = self.queries(rows, offset)
        keys, values = cache.append(*self.keys_values(rows, offset))
        return self.attend(queries, keys, values, mask)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        scale = self._sizes.head_dim**-0.5
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return self.o_proj(mixed.swapaxes(1, 2).flatten(2))

    def _placed(self, rows: mx.array, norm: str, offset: int | mx.array) -> mx.array:
        by_head = self._by_head(rows)
        if norm in self:
            by_head = self[norm](by_head)
        heads = by_head.swapaxes(1, 2)
        return heads if self._rope is None else self._rope(heads, offset=offset)

    def _by_head(self, rows: mx.array) -> mx.array:
        return rows.reshape(*rows.shape[:2], -1, self._sizes.head_dim)


class FeedForward(nn.Module):
    """The gated network after the attention. For `present` and `path`, see `Attention`."""

    def __init__(self, sizes: LayerSizes, present: Names, path: str) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.intermediate
        self.gate_proj = linear(present, f"{path}.gate_proj", width, inner)
        self.up_proj = linear(present, f"{path}.up_proj", width, inner)
        self.down_proj = linear(present, f"{path}.down_proj", inner, width)

    def __call__(self, rows: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One transformer layer.

    Args:
        sizes: The sizes of the layer.
        number: The number of the layer in the names of the files' tensors.
        inputs: See `Attention`.
        present: See `Attention`.
        normed: Whether a norm precedes the attention.
    """

    def __init__(
        self, sizes: LayerSizes, number: int, inputs: int, present: Names, normed: bool = True
    ) -> None:
        super().__init__()
        path = f"layers.{number}"
        if normed:
            self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes, inputs, present, f"{path}.self_attn")
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes, present, f"{path}.mlp")
        if (source := sizes.encoder_width) is not None:
            encoder_path = f"{path}.{ENCODER_ATTENTION}"
            self.encoder_attn = Attention(sizes, sizes.width, present, encoder_path, source)
            self.encoder_attn_layernorm = nn.RMSNorm(sizes.width, sizes.eps)

    def finish(
        self, rows: mx.array, attended: mx.array, source: SourceKeysValues | None = None
    ) -> mx.array:
        """Return the layer's output.

        Args:
            rows: The residual, (batch, m, width).
            attended: The output of the self-attention, (batch, m, width).
            source: The layer's entry of `DrafterNetwork.sources`.
        """
        rows = self.look_at(source, rows + attended)
        return rows + self.mlp(self.post_attention_layernorm(rows))

    def look_at(self, source: SourceKeysValues | None, rows: mx.array) -> mx.array:
        """Add the attention to the encoder's output to rows, (batch, m, width), if the layer has
        such an attention."""
        if ENCODER_ATTENTION not in self:
            return rows
        assert source is not None, "the layer attends to a source"
        queries = self.encoder_attn.queries(self.encoder_attn_layernorm(rows))
        return rows + self.encoder_attn.attend(queries, *source)
