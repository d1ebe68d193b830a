"""The transformer layers of drafters, and their rotary position embeddings.

DFlash and DSpark drafters also have layers of other forms than Qwen 3's. The trainers copy a
target's config.json, so that many entries describe the target and not the drafter. Source:
deepseek-ai/DeepSpec, transformers (Muse Glimmer's assistant), and ARahim3/mlx-dspark."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention_parts import attend_by_kernel
from ..encoder_decoder.layers import Attention, Mask, Offset
from ..foreign import spelled_old
from .files import DrafterFiles, LayerSizes, is_named

SINKS = "attention_sink_bias"
"""Tensor with the score of an additional key of each head, which has no value."""


def rope_of(sizes: LayerSizes) -> Callable[..., mx.array]:
    """Return a module that rotates (batch, heads, m, head_dim) from position `offset` on."""
    if sizes.rope_scaling is None:
        return nn.RoPE(sizes.head_dim, traditional=sizes.interleaved, base=sizes.rope_theta)
    from mlx_lm.models.rope_utils import initialize_rope

    from ..mlx_lm.mends import yarn

    settings = {"original_max_position_embeddings": sizes.max_positions, **sizes.rope_scaling}
    rope: Any = initialize_rope(
        sizes.head_dim, sizes.rope_theta, sizes.interleaved, settings, sizes.max_positions
    )
    yarn(rope, {"rope_scaling": settings, "rope_theta": sizes.rope_theta})
    return rope


Source = tuple[mx.array, mx.array, mx.array | None] | None
"""One layer's keys and values of the encoder's output, (batch, kv_heads, n, head_dim) each, and a
mask, (batch, 1, 1, n) bool, which is False for padding; None without padding. A layer without an
attention to the encoder has None."""


class DrafterAttention(Attention):
    """The self-attention of the layer `number`. Queries, keys and values are computed from states
    of width `inputs`; None for the drafter's width."""

    def __init__(self, files: DrafterFiles, number: int, inputs: int | None = None) -> None:
        sizes, present, path = files.sizes, files.tensors, f"layers.{number}.self_attn"
        heads, scale = (sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.head_dim**-0.5
        super().__init__(sizes.width, *heads, scale=scale, inputs=inputs, rope=rope_of(sizes))
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

    def __init__(self, sizes: LayerSizes, activation: Any = nn.silu) -> None:
        super().__init__()
        self._activation = activation
        self.gate_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.width, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        return self.down_proj(self._activation(self.gate_proj(rows)) * self.up_proj(rows))


class DrafterLayer(nn.Module):
    """The transformer layer `number`. `normed` says whether a norm precedes the attention. See
    `DrafterAttention` for `inputs`."""

    def __init__(
        self, files: DrafterFiles, number: int, inputs: int | None = None, *, normed: bool = True
    ) -> None:
        super().__init__()
        sizes = files.sizes
        if normed:
            self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = DrafterAttention(files, number, inputs)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes)
        if (source := sizes.encoder_width) is not None:
            heads, scale = (sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.head_dim**-0.5
            self.encoder_attn = Attention(sizes.width, *heads, scale=scale, attended=source)
            self.encoder_attn_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and f"layers.{number}.{name}.bias" in files.tensors:
                module.bias = mx.zeros(module.weight.shape[:1])

    def __call__(
        self, states: mx.array, attend: Callable[[mx.array], mx.array], source: Source = None
    ) -> mx.array:
        """Run the layer over states, (batch, m, width). `attend` computes the self-attention from
        its inputs."""
        return self.finish(states, attend(self.input_layernorm(states)), source)

    def finish(self, rows: mx.array, attended: mx.array, source: Source = None) -> mx.array:
        """Return the layer's output, from the residual and the output of the self-attention,
        (batch, m, width) each. See `Source` for `source`."""
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


MUSE_GLIMMER = "muse_glimmer_assistant"
GATED = "enable_qwen35_gated_q_proj"
ROTATED = "partial_rotary_factor"


def adapted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration in the form of Qwen 3's drafters."""
    if is_gemma(config):
        config = spelled_old(config)
        ropes = config.get("rope_parameters", {}).get("full_attention", {})
        shared = "num_global_key_value_heads" if config.get("attention_k_eq_v") else ""
        return {
            **config,
            "head_dim": config.get("global_head_dim", config.get("head_dim")),
            "num_key_value_heads": config.get(shared, config.get("num_key_value_heads")),
            "rope_parameters": {"rope_theta": ropes.get("rope_theta", 1e6)},
            "rotated_share": ropes.get(ROTATED, 0.25),
            "layer_types": None,
            ROTATED: None,
        }
    if config.get("model_type") == MUSE_GLIMMER:
        # The entries that its config.json lacks.
        return {"vocab_size": 202048, "is_causal": False, **config}
    if config.get(GATED):
        ropes = config.get("rope_parameters", {})
        return {**config, "rotated_share": ropes.get(ROTATED, config.get(ROTATED)), ROTATED: None}
    # A copy of the target's. The trainer rotates whole heads.
    return {**config, ROTATED: None}


def is_gemma(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")).startswith("gemma4") and is_named(config, ".*Gemma4.*")


def layer_of(
    files: DrafterFiles, number: int, usual: type[DrafterLayer] = DrafterLayer
) -> DrafterLayer:
    """Return the layer `number` of a drafter, with random weights. `usual` is the class of layers
    that are not a Gemma 4's."""
    if is_gemma(files.settings):
        return Gemma4Layer(files, number)
    layer = usual(files, number)
    if files.settings.get(GATED):
        layer.self_attn = GatedAttention(files, number)
    return layer


class GatedAttention(DrafterAttention):
    """Qwen 3.5's attention, whose output is gated, and which rotates a share of each head."""

    def __init__(self, files: DrafterFiles, number: int) -> None:
        super().__init__(files, number)
        sizes, share = files.sizes, float(files.settings.get("rotated_share") or 1)
        self._heads_count = sizes.heads
        self.q_proj = nn.Linear(sizes.width, 2 * sizes.heads * sizes.head_dim, bias=False)
        self._rope = nn.RoPE(int(sizes.head_dim * share), base=sizes.rope_theta)

    def __call__(
        self, states: mx.array, attended: Any, mask: Any, offset: Offset = None
    ) -> mx.array:
        batch, rows, _ = states.shape
        # Each head's queries are followed by its gate.
        both = self.q_proj(states).reshape(batch, rows, self._heads_count, -1)
        queries, gate = mx.split(both, 2, axis=-1)
        queries = self._placed("q_norm", queries.swapaxes(1, 2), offset)
        keys, values = attended
        mixed = attend_by_kernel(self._mixed, queries, keys, values, mask)
        flat = mixed.swapaxes(1, 2).reshape(batch, rows, -1)
        return self.o_proj(flat * mx.sigmoid(gate.reshape(batch, rows, -1)))


class Gemma4Attention(DrafterAttention):
    """The attention of Gemma 4's layers with full attention. Values are normed, and they are
    computed from the same projection as keys if there is no other."""

    def __init__(self, files: DrafterFiles, number: int) -> None:
        from mlx_lm.models.rope_utils import initialize_rope

        super().__init__(files, number)
        sizes = files.sizes
        self._scale, self._eps = 1.0, sizes.eps
        scaling = {"rope_type": "proportional", ROTATED: files.settings["rotated_share"]}
        self._rope = initialize_rope(sizes.head_dim, sizes.rope_theta, False, scaling)
        if f"layers.{number}.self_attn.v_proj.weight" not in files.tensors:
            del self["v_proj"]

    def keys_values(self, states: mx.array, offset: Offset = 0) -> tuple[mx.array, mx.array]:
        keys = self._heads(self.k_proj(states))
        values = self._heads(self.v_proj(states)) if "v_proj" in self else keys
        return self._placed("k_norm", keys, offset), mx.fast.rms_norm(values, None, self._eps)


class Gemma4Layer(DrafterLayer):
    """Gemma 4's layer, with norms before and after each part."""

    def __init__(self, files: DrafterFiles, number: int) -> None:
        super().__init__(files, number)
        sizes = files.sizes
        self.self_attn = Gemma4Attention(files, number)
        self.mlp = FeedForward(sizes, nn.gelu_approx)
        self.pre_feedforward_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.post_feedforward_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.layer_scalar = mx.ones((1,))

    def finish(self, rows: mx.array, attended: mx.array, source: Source = None) -> mx.array:
        rows = rows + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(rows))
        return (rows + self.post_feedforward_layernorm(inner)) * self.layer_scalar
