"""What the config.json of a drafter says; every value is checked before it is used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.t5_keys import LARGEST
from ...errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
ENCODER_ATTENTION = "encoder_attn"
"""The attention of a layer to the output of the target's encoder."""
ATTENDS = "encoder_attention"
"""The name in config.json that says whether layers have it; false where the target has no encoder.
This name and encoder_hidden_size are this package's own: no other program has drafters for
encoder-decoder models."""
ROPE_FACTORS = (
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
)
_THETA, _USUAL_THETA = "rope_theta", 10000.0
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
"""The defaults of transformers, which configurations of `speculators` leave out."""


class Settings:
    """The parts of one configuration. A name has the value of the first part that has it, and not
    as null. Methods raise CheckpointError for a value of another kind."""

    def __init__(self, file: Path, *parts: object) -> None:
        self.file = file
        self._parts = [part for part in parts if isinstance(part, Mapping)]

    def get(self, name: str) -> Any:
        """Return the value as it is, None where there is none."""
        values = (part.get(name) for part in self._parts)
        return next((value for value in values if value is not None), None)

    def whole(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        """Return a whole number."""

        def fits(value: Any) -> bool:
            return type(value) is int and least <= value <= most

        number: int = self._checked(name, default, fits, f"a whole number from {least} to {most}")
        return number

    def above_zero(self, name: str, default: float) -> float:
        """Return a number above 0."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < math.inf

        return float(self._checked(name, default, fits, "a number above 0"))

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        flag: bool = self._checked(
            name, default, lambda value: type(value) is bool, "true or false"
        )
        return flag

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers; None where there is none, or an empty one, which
        templates have."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(type(each) is int for each in value)

        return tuple(self._checked(name, [], fits, "a list of whole numbers")) or None

    @property
    def dtype(self) -> str:
        """The type of the weights, as safetensors writes it; F32 where the file does not say it."""
        stated = str(self.get("dtype") or self.get("torch_dtype") or "").rpartition(".")[2]
        return {"float16": "F16", "bfloat16": "BF16"}.get(stated, "F32")

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """Return the error that the value of a name is not what it has to be."""
        value = self.get(name)
        stated = "nothing" if value is None else f"{value!a:.60}"
        return CheckpointError(f"{self.file} says {stated} for {name}: it has to be {wanted}")

    def _checked(self, name: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if not fits(value):
            raise self.wrong(name, wanted)
        return value


@dataclass(frozen=True)
class Sizes:
    """What every drafter has. width: of its hidden states. eps: of its norms."""

    width: int
    eps: float


@dataclass(frozen=True)
class LayerSizes(Sizes):
    """The transformer layers of a drafter, which are Llama's or Qwen 3's.

    rope_theta, rope_scaling, max_positions: of the drafter's own rotary positions. interleaved:
    neighboring entries are rotated together. encoder_width: width of the output of the target's
    encoder, where layers attend to it.
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

    def tensors(self, first_inputs: int) -> tuple[Shapes, Shapes]:
        """Return the tensors that all layers need, and those that they may have: the files decide,
        whatever config.json says. first_inputs: width of what the first layer makes queries, keys
        and values of."""
        needed: Shapes = {}
        optional: Shapes = {}
        if self.encoder_width is not None:
            needed["encoder_norm.weight"] = (self.encoder_width,)
        for number in range(self.count):
            both = self._layer(self.width if number else first_inputs)
            for shapes, its in zip((needed, optional), both, strict=True):
                shapes |= {f"layers.{number}.{name}": shape for name, shape in its.items()}
        return needed, optional

    def _layer(self, inputs: int) -> tuple[Shapes, Shapes]:
        wide, width = (self.intermediate, self.width), self.width
        attentions = {"self_attn": (inputs, inputs)}
        needed: Shapes = {
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": (self.width, self.intermediate),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        if self.encoder_width is not None:
            attentions[ENCODER_ATTENTION] = (width, self.encoder_width)
            needed[f"{ENCODER_ATTENTION}_layernorm.weight"] = (width,)
        optional: Shapes = {
            "mlp.gate_proj.bias": (self.intermediate,),
            "mlp.up_proj.bias": (self.intermediate,),
            "mlp.down_proj.bias": (width,),
        }
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, (of_queries, of_keys) in attentions.items():
            needed |= {
                f"{name}.q_proj.weight": (inner, of_queries),
                f"{name}.k_proj.weight": (outer, of_keys),
                f"{name}.v_proj.weight": (outer, of_keys),
                f"{name}.o_proj.weight": (width, inner),
            }
            optional |= {
                f"{name}.q_proj.bias": (inner,),
                f"{name}.k_proj.bias": (outer,),
                f"{name}.v_proj.bias": (outer,),
                f"{name}.o_proj.bias": (width,),
                f"{name}.q_norm.weight": (self.head_dim,),
                f"{name}.k_norm.weight": (self.head_dim,),
            }
        return needed, optional


def layer_sizes(settings: Settings, model_type: object) -> LayerSizes:
    """Return the sizes of a drafter's layers. model_type: whose defaults hold where config.json is
    silent; None where it may not be silent. Raises CheckpointError."""
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
    rope = Settings(settings.file, positions, {_THETA: settings.get(_THETA)})
    encoder_width = None
    if settings.flag(ATTENDS, False):
        its = settings.whole("target_hidden_size", width)
        encoder_width = settings.whole("encoder_hidden_size", its)
    return LayerSizes(
        count=whole("num_hidden_layers"),
        width=width,
        intermediate=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(1, width // heads)),
        eps=settings.above_zero("rms_norm_eps", 1e-6),
        rope_theta=rope.above_zero(_THETA, _USUAL_THETA),
        rope_scaling=positions if _scales(rope) else None,
        max_positions=settings.whole("max_position_embeddings", 2048),
        interleaved=not settings.flag("rope_is_neox_style", True),
        encoder_width=encoder_width,
    )


def _scales(rope: Settings) -> bool:
    """Return whether positions are scaled. Raises CheckpointError for an unknown scaling."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.wrong("rope_type", "default, linear, llama3 or yarn")
    if kind == "default":
        return False
    rope.above_zero("factor", 0.0)
    for name in ROPE_FACTORS:
        rope.above_zero(name, 1.0)
    rope.flag("truncate", True)
    if rope.above_zero(_THETA, _USUAL_THETA) <= 1:
        raise rope.wrong(_THETA, "above 1 where positions are scaled")
    return True


@dataclass(frozen=True)
class Description:
    """What config.json says of a drafter with Llama's or Qwen 3's layers.

    layered: the package `speculators` wrote it, which describes the layers in a part of their own.
    vocabulary: the target's, in tokens. drafted: the drafter's.
    """

    settings: Settings
    sizes: LayerSizes
    layered: bool
    vocabulary: int
    drafted: int

    @classmethod
    def of(
        cls, directory: Path, config: Mapping[str, Any], vocabulary: int, before: object = None
    ) -> Description:
        """Read a configuration. vocabulary: of the target, where a file of `speculators` does not
        say it. before: a part that takes precedence over all others. Raises CheckpointError."""
        inner = config.get("transformer_layer_config")
        layered = isinstance(inner, Mapping)
        settings = Settings(directory / "config.json", before, inner, config)
        sizes = layer_sizes(
            settings, inner.get("model_type") if isinstance(inner, Mapping) else None
        )
        vocabulary = settings.whole("vocab_size", vocabulary if layered else None)
        drafted = settings.whole("draft_vocab_size", vocabulary)
        return cls(settings, sizes, layered, vocabulary, drafted)


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the entries of its `dflash_config`, which take precedence."""
    inner = config.get("dflash_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def is_named(config: Mapping[str, Any], pattern: str) -> bool:
    """Return whether the whole name of one of the architectures matches a pattern."""
    listed = config.get("architectures")
    return isinstance(listed, list) and any(re.fullmatch(pattern, str(each)) for each in listed)
