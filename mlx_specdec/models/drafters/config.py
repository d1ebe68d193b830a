"""What the config.json of a drafter says. `kinds.read` turns whatever a strange value breaks into
one error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.tensors import MOST_LAYERS
from ...errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
ENCODER_ATTENTION = "encoder_attn"
"""The attention of a layer to the output of the target's encoder."""
ATTENDS = "encoder_attention"
"""The name in config.json that says whether layers have it; false where the target has no encoder.
This name and encoder_hidden_size are this package's own: no other program has drafters for
encoder-decoder models."""
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "head_dim"),
)


class Settings(dict[str, Any]):
    """The entries of several parts of one configuration, without nulls. The first part that has a
    name counts. Looking up a name that is missing raises CheckpointError."""

    def __init__(self, file: Path, *parts: object) -> None:
        super().__init__()
        self.file = file
        for part in reversed(parts):
            if isinstance(part, Mapping):
                self.update((name, value) for name, value in part.items() if value is not None)

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"{self.file} has no {name}")

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers; None where there is none, or an empty one, which
        templates have."""
        return tuple(map(int, self.get(name, ()))) or None

    def tapped(self, by_input: str) -> tuple[int, ...] | None:
        """Return the layers whose outputs are read. by_input: the entry that names layers by their
        inputs; inside of eagle_config, and as target_layer_ids, they are named by their outputs."""
        if (layers := self.ids(by_input)) is not None:
            return tuple(layer - 1 for layer in layers)
        inside = Settings(self.file, self.get("eagle_config")).ids(by_input)
        return self.ids("target_layer_ids") if inside is None else inside

    def token(self, name: str, vocabulary: int) -> int:
        if not 0 <= (token := int(self[name])) < vocabulary:
            raise self.wrong(name, f"one of the target's {vocabulary} tokens")
        return token

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        stated = f"{self[name]!a:.60}" if name in self else "nothing"
        return CheckpointError(f"{self.file} says {stated} for {name}: it has to be {wanted}")


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a drafter and of its transformer layers, which are Llama's or Qwen 3's; a kind
    whose layers mlx-lm computes has the first two alone. width: of its hidden states. eps: of its
    norms. rope_theta, rope_scaling, max_positions: of its rotary positions. interleaved:
    neighboring entries are rotated together. encoder_width: width of the output of the target's
    encoder, where layers attend to it."""

    width: int
    eps: float
    count: int = 1
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_positions: int = 0
    interleaved: bool = False
    encoder_width: int | None = None


def layer_sizes(settings: Settings, model_type: object) -> LayerSizes:
    """Return the sizes of a drafter's layers. model_type: whose defaults hold where config.json is
    silent; None where it may not be silent. Raises CheckpointError."""
    if model_type in ("llama", "qwen3") and not settings.keys() >= {*_SHAPE}:
        from transformers import AutoConfig  # whose defaults `speculators` leaves out

        stated = {name: settings[name] for name in _SHAPE if name in settings}
        whole = AutoConfig.for_model(model_type, **stated)
        settings = Settings(
            settings.file, settings, {name: getattr(whole, name) for name in _SHAPE}
        )
    for name, usual in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
        if settings.get(name, usual) != usual:
            raise settings.wrong(name, str(usual))
    if (count := int(settings["num_hidden_layers"])) > MOST_LAYERS:
        raise settings.wrong("num_hidden_layers", f"at most {MOST_LAYERS}")
    width, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    positions = settings.get("rope_parameters") or settings.get("rope_scaling")
    if isinstance(positions, Mapping) and "sliding_attention" in positions:
        # The target's, by kind of attention: `speculators` turns all layers of a drafter so.
        positions = positions["sliding_attention"]
    rope = Settings(settings.file, positions)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.wrong("rope_type", "default, linear, llama3 or yarn")
    encoder_width = None
    if settings.get(ATTENDS):
        its = settings.get("target_hidden_size", width)
        encoder_width = int(settings.get("encoder_hidden_size", its))
    return LayerSizes(
        count=count,
        width=width,
        intermediate=int(settings["intermediate_size"]),
        heads=heads,
        kv_heads=int(settings.get("num_key_value_heads", heads)),
        head_dim=int(settings.get("head_dim", width // heads)),
        eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10000.0))),
        rope_scaling=None if kind == "default" else positions,
        max_positions=int(settings.get("max_position_embeddings", 2048)),
        interleaved=not settings.get("rope_is_neox_style", True),
        encoder_width=encoder_width,
    )


@dataclass(frozen=True)
class Description:
    """What config.json says of a drafter with Llama's or Qwen 3's layers. layered: the package
    `speculators` wrote it, which describes the layers in a part of their own. vocabulary: the
    target's, in tokens. drafted: the drafter's."""

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
        sizes = layer_sizes(settings, Settings(settings.file, inner).get("model_type"))
        if layered:
            settings.setdefault("vocab_size", vocabulary)
        vocabulary = int(settings["vocab_size"])
        drafted = int(settings.get("draft_vocab_size", vocabulary))
        return cls(settings, sizes, layered, vocabulary, drafted)


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("dflash_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def is_named(config: Mapping[str, Any], pattern: str) -> bool:
    listed = config.get("architectures")
    return isinstance(listed, list) and any(re.fullmatch(pattern, str(each)) for each in listed)
