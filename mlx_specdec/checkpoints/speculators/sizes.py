"""The transformer layers of drafters: their sizes, and what their tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .settings import Settings

Shapes = dict[str, tuple[int, ...]]
NUMBERS = (
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
"""What may be said of scaled positions."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
"""transformers', which configurations of `speculators` leave out."""


@dataclass(frozen=True)
class Sizes:
    """Of every drafter. width: of its hidden states. eps: of the norms."""

    width: int
    eps: float


@dataclass(frozen=True)
class LayerSizes(Sizes):
    """The transformer layers of a drafter, which are Llama's or Qwen 3's.

    rope_theta, rope_scaling, max_positions: of rotary positions, the drafter's
    own. interleaved: neighboring entries are rotated together.
    """

    count: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int
    interleaved: bool

    def shapes(self, number: int, inputs: int) -> Shapes:
        """The tensors of one layer. inputs: width of what queries, keys and values are made of."""
        inner, wide = self.heads * self.head_dim, (self.intermediate, self.width)
        own = {
            "self_attn.q_proj.weight": (inner, inputs),
            "self_attn.k_proj.weight": (self.kv_heads * self.head_dim, inputs),
            "self_attn.v_proj.weight": (self.kv_heads * self.head_dim, inputs),
            "self_attn.o_proj.weight": (self.width, inner),
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": (self.width, self.intermediate),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }
        return {f"layers.{number}.{name}": shape for name, shape in own.items()}

    def optional(self, number: int) -> Shapes:
        """What a layer may have beside them: presence decides, whatever config.json says."""
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        own = {
            "self_attn.q_proj.bias": (inner,),
            "self_attn.k_proj.bias": (outer,),
            "self_attn.v_proj.bias": (outer,),
            "self_attn.o_proj.bias": (self.width,),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.bias": (self.intermediate,),
            "mlp.up_proj.bias": (self.intermediate,),
            "mlp.down_proj.bias": (self.width,),
        }
        return {f"layers.{number}.{name}": shape for name, shape in own.items()}


def layer_sizes(settings: Settings, model_type: object) -> LayerSizes:
    """From a drafter's configuration. model_type: whose defaults stand where it is silent; None
    where it may not be silent. Raises CheckpointError."""
    default = _DEFAULTS.get(str(model_type), {})

    def whole(name: str, otherwise: int | None = None) -> int:
        return settings.whole(name, default.get(name, otherwise))

    if settings.get("hidden_act") not in (None, "silu"):
        raise settings.wrong("hidden_act", "silu")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise settings.wrong("partial_rotary_factor", "1")
    width, heads = whole("hidden_size"), whole("num_attention_heads")
    positions = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = Settings(settings.file, positions)
    return LayerSizes(
        count=whole("num_hidden_layers"),
        width=width,
        intermediate=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(1, width // heads)),
        eps=settings.above_zero("rms_norm_eps", 1e-6),
        rope_theta=rope.above_zero("rope_theta", settings.above_zero("rope_theta", 10000.0)),
        rope_scaling=positions if _scales(rope) else None,
        max_positions=settings.whole("max_position_embeddings", 2048),
        interleaved=not settings.flag("rope_is_neox_style", True),
    )


def _scales(rope: Settings) -> bool:
    """Whether positions are scaled. Raises CheckpointError for a scaling that is not known."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.wrong("rope_type", "default, linear, llama3 or yarn")
    if kind == "default":
        return False
    rope.above_zero("factor", 0.0)
    for name in NUMBERS:
        rope.above_zero(name, 1.0)
    return True
