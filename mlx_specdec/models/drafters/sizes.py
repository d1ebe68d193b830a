"""The transformer layers of drafters: their sizes, and what their tensors are called."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.t5_keys import LARGEST
from ...errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
NUMBERS = (
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
)
"""What may be said of scaled positions."""
THETA, USUAL_THETA = "rope_theta", 10000.0
ENCODER_ATTENTION = "encoder_attn"
"""The attention of a layer to what the target's encoder put out."""
ATTENDS = "encoder_attention"
"""What config.json says of it; false where the target has no encoder."""
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

    rope_theta, rope_scaling, max_positions: of rotary positions, the drafter's own. interleaved:
    neighboring entries are rotated together. encoder_width: of what the target's encoder puts out,
    where layers attend to it as well.
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
    encoder_width: int | None = None

    def shapes(self, number: int, inputs: int) -> Shapes:
        """The tensors of one layer. inputs: width of what queries, keys and values are made of."""
        wide = (self.intermediate, self.width)
        own = {
            **self._attention("self_attn", inputs, inputs),
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": (self.width, self.intermediate),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }
        if self.encoder_width is not None:
            own |= self._attention(ENCODER_ATTENTION, self.width, self.encoder_width)
            own[f"{ENCODER_ATTENTION}_layernorm.weight"] = (self.width,)
        return {f"layers.{number}.{name}": shape for name, shape in own.items()}

    def before_layers(self) -> Shapes:
        """What all layers share of attending to the encoder."""
        return {} if self.encoder_width is None else {"encoder_norm.weight": (self.encoder_width,)}

    def optional(self, number: int) -> Shapes:
        """What a layer may have beside them: presence decides, whatever config.json says."""
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        own: Shapes = {
            "mlp.gate_proj.bias": (self.intermediate,),
            "mlp.up_proj.bias": (self.intermediate,),
            "mlp.down_proj.bias": (self.width,),
        }
        for name in ("self_attn", *([ENCODER_ATTENTION] if self.encoder_width else [])):
            own |= {
                f"{name}.q_proj.bias": (inner,),
                f"{name}.k_proj.bias": (outer,),
                f"{name}.v_proj.bias": (outer,),
                f"{name}.o_proj.bias": (self.width,),
                f"{name}.q_norm.weight": (self.head_dim,),
                f"{name}.k_norm.weight": (self.head_dim,),
            }
        return {f"layers.{number}.{name}": shape for name, shape in own.items()}

    def _attention(self, name: str, asking: int, asked: int) -> Shapes:
        """asking, asked: widths of what queries, and keys and values are made of."""
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            f"{name}.q_proj.weight": (inner, asking),
            f"{name}.k_proj.weight": (outer, asked),
            f"{name}.v_proj.weight": (outer, asked),
            f"{name}.o_proj.weight": (self.width, inner),
        }


def described(
    directory: Path, config: Mapping[str, Any], before: object = None
) -> tuple[Settings, LayerSizes, bool]:
    """What config.json says, its layers, and whether `speculators` wrote it, which describes them
    in a part of its own. before: another part, which goes before all. Raises CheckpointError."""
    inner = config.get("transformer_layer_config")
    settings = Settings(directory / "config.json", before, inner, config)
    if not isinstance(inner, Mapping):
        return settings, layer_sizes(settings, None), False
    return settings, layer_sizes(settings, inner.get("model_type")), True


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
    if isinstance(positions, Mapping) and "sliding_attention" in positions:
        # The target's, by kind of attention: `speculators` turns all layers of a drafter so.
        positions = positions["sliding_attention"]
    rope = Settings(settings.file, positions, {THETA: settings.get(THETA)})
    return LayerSizes(
        count=whole("num_hidden_layers"),
        width=width,
        intermediate=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(1, width // heads)),
        eps=settings.above_zero("rms_norm_eps", 1e-6),
        rope_theta=rope.above_zero(THETA, USUAL_THETA),
        rope_scaling=positions if _scales(rope) else None,
        max_positions=settings.whole("max_position_embeddings", 2048),
        interleaved=not settings.flag("rope_is_neox_style", True),
        encoder_width=_encoder_width(settings, width),
    )


def _encoder_width(settings: Settings, width: int) -> int | None:
    """None where layers do not attend to the target's encoder. Both names are this package's own:
    no other program has drafters for encoder-decoder models."""
    if not settings.flag(ATTENDS, False):
        return None
    return settings.whole("encoder_hidden_size", settings.whole("target_hidden_size", width))


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
    rope.flag("truncate", True)
    if rope.above_zero(THETA, USUAL_THETA) <= 1:
        raise rope.wrong(THETA, "above 1 where positions are scaled")
    return True


class Settings:
    """parts: of one configuration; the first that has a name, and not as null, says what it is."""

    def __init__(self, file: Path, *parts: object) -> None:
        self.file = file
        self._parts = [part for part in parts if isinstance(part, Mapping)]

    def get(self, name: str) -> Any:
        """The value as it stands; None where there is none."""
        values = (part.get(name) for part in self._parts)
        return next((value for value in values if value is not None), None)

    def whole(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        """A whole number. Raises CheckpointError, as all that follow."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def above_zero(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where there is none, or an empty one, as in templates."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(value)

    @property
    def dtype(self) -> str:
        """Of the weights, as safetensors writes it; F32 where nothing says it."""
        said = str(self.get("dtype") or self.get("torch_dtype") or "").rpartition(".")[2]
        return {"float16": "F16", "bfloat16": "BF16"}.get(said, "F32")

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """That what the file says under a name is something else."""
        value = self.get(name)
        said = "nothing" if value is None else f"{value!a:.60}"
        return CheckpointError(f"{self.file} says {said} for {name}: it has to be {wanted}")


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what stands in `dflash_config`, which goes before the rest."""
    inner = config.get("dflash_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def is_named(config: Mapping[str, Any], pattern: str) -> bool:
    """Whether one of the architectures looks so, in whole."""
    listed = config.get("architectures")
    return isinstance(listed, list) and any(re.fullmatch(pattern, str(one)) for one in listed)
