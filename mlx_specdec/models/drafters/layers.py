"""The transformer layers of drafters, and their rotary position embeddings."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..encoder_decoder.layers import Attention, Mask, RotaryAttention
from .files import LayerSizes

SINKS = "attention_sink_bias"
"""Tensor with the score of an additional key of each head, which has no value."""
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


Source = tuple[mx.array, mx.array, mx.array | None] | None
"""One layer's keys and values of the encoder's output, (batch, kv_heads, n, head_dim) each, and a
mask, (batch, 1, 1, n) bool, which is False for padding; None without padding. A layer without an
attention to the encoder has None."""


def add_biases(module: nn.Module, present: Names, path: str) -> None:
    """Add a bias to each linear layer of the module at `path` for which the drafter has one."""
    for name, layer in module.items():
        if f"{path}.{name}.bias" in present:
            layer.bias = mx.zeros(layer.weight.shape[:1])


class DrafterAttention(RotaryAttention):
    """A layer's self-attention, whose name among the drafter's tensors is `path`. Queries, keys and
    values are computed from states of width `inputs`."""

    def __init__(self, sizes: LayerSizes, inputs: int, present: Names, path: str) -> None:
        heads, scale = (sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.head_dim**-0.5
        super().__init__(sizes.width, *heads, scale=scale, inputs=inputs, rope=rope_of(sizes))
        add_biases(self, present, path)
        for name in ("q_norm", "k_norm"):
            if f"{path}.{name}.weight" in present:
                self[name] = nn.RMSNorm(sizes.head_dim, sizes.eps)
        if f"{path}.{SINKS}" in present:
            self[SINKS] = mx.zeros((sizes.heads,))

    def _mixed(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
        sinks = self[SINKS].astype(queries.dtype) if SINKS in self else None
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._scale, mask=mask, sinks=sinks
        )


class FeedForward(nn.Module):
    """The gated network after the attention."""

    def __init__(
        self, sizes: LayerSizes, present: Names, path: str, activation: Any = nn.silu
    ) -> None:
        super().__init__()
        self._activation = activation
        self.gate_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.width, bias=False)
        add_biases(self, present, path)

    def __call__(self, rows: mx.array) -> mx.array:
        return self.down_proj(self._activation(self.gate_proj(rows)) * self.up_proj(rows))


class DrafterLayer(nn.Module):
    """The transformer layer `number`. `normed` says whether a norm precedes the attention. For
    `inputs`, see `DrafterAttention`."""

    def __init__(
        self, sizes: LayerSizes, number: int, inputs: int, present: Names, normed: bool = True
    ) -> None:
        super().__init__()
        path = f"layers.{number}"
        if normed:
            self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = DrafterAttention(sizes, inputs, present, f"{path}.self_attn")
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes, present, f"{path}.mlp")
        if (source := sizes.encoder_width) is not None:
            heads, scale = (sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.head_dim**-0.5
            self.encoder_attn = Attention(sizes.width, *heads, scale=scale, attended=source)
            self.encoder_attn_layernorm = nn.RMSNorm(sizes.width, sizes.eps)

    def finish(self, rows: mx.array, attended: mx.array, source: Source = None) -> mx.array:
        """Return the layer's output, from the residual and the output of the self-attention,
        (batch, m, width) each. `source` is the layer's entry of `DrafterNetwork.sources`."""
        rows = self.look_at(source, rows + attended)
        return rows + self.mlp(self.post_attention_layernorm(rows))

    def look_at(self, source: Source, rows: mx.array) -> mx.array:
        """Add the attention to the encoder's output to rows, (batch, m, width), if the layer has
        such an attention."""
        if "encoder_attn" not in self:
            return rows
        assert source is not None, "the layer attends to a source"
        keys, values, mask = source
        return rows + self.encoder_attn(self.encoder_attn_layernorm(rows), (keys, values), mask)
