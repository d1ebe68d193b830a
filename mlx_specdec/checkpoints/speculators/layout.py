"""What the kinds of drafters have in common in their files: layers, tapped layers, vocabularies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..configuration import check_weights
from ..files import Weights
from ..tensors import DTYPES
from .settings import Settings

Shapes = dict[str, tuple[int, ...]]
WIDTHS, DEPTHS = (
    ("hidden_size", "d_model", "n_embd"),
    ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"),
)
"""What config.json of whole models calls both."""
UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What d2t says as well, and what only training needs."""
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
class LayerSizes:
    """The transformer layers of a drafter, which are Llama's or Qwen 3's.

    eps: of the norms. rope_theta, rope_scaling, max_positions: of rotary positions, the drafter's
    own. interleaved: neighboring entries are rotated together.
    """

    count: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
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
    if kind != "default":
        rope.above_zero("factor", 0.0)
    return bool(kind != "default")


@dataclass(frozen=True)
class SpeculatorFiles(ABC):
    """A drafter as it lies in a directory.

    kind: a key of KINDS. tapped: the target's layers, counted from 0, whose outputs it reads, in
    the order in which it puts them side by side; None for the kind's own choice. taps: how many
    they are. target_width: of each. vocabulary: the target's, as config.json says. target_ids: the
    target's token for each of the drafter's; None where they are the same. tensors: by name, lazy,
    each of the shape that the kind asks for.
    """

    directory: Path
    kind: str
    sizes: LayerSizes
    tapped: tuple[int, ...] | None
    taps: int
    target_width: int
    vocabulary: int
    target_ids: tuple[int, ...] | None
    tensors: Mapping[str, mx.array]

    @abstractmethod
    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The target's layers that this kind reads where nothing says which; see `tapped`."""

    def tapped_of(self, layers: int) -> tuple[int, ...]:
        """The layers of a target of so many that are tapped. Raises CheckpointError."""
        tapped = self.usual_layers(layers) if self.tapped is None else self.tapped
        if len(tapped) != self.taps:
            raise CheckpointError(
                f"{self.directory} reads {self.taps} hidden states side by side, and names "
                f"{len(tapped)} layers of the target: its config.json belongs to another drafter"
            )
        if wrong := [layer for layer in tapped if not 0 <= layer < layers]:
            raise CheckpointError(
                f"{self.directory} reads what layer {wrong[0]} of the target puts out, and the "
                f"target has layers 0 to {layers - 1}: the drafter belongs to another target"
            )
        return tapped

    def check(self, width: int | None, layers: int | None, vocabulary: int | None) -> None:
        """Raises CheckpointError for a target that this drafter was not made for. None: that is not
        known of the target."""
        for what, its, the_targets in (
            ("hidden states of width", self.target_width, width),
            ("a vocabulary of", self.vocabulary, vocabulary),
        ):
            if the_targets is not None and its != the_targets:
                raise CheckpointError(
                    f"{self.directory} drafts for a target with {what} {its}, and this one has "
                    f"{the_targets}: the drafter belongs to another target"
                )
        if layers is not None:
            self.tapped_of(layers)

    def check_config(self, config: Mapping[str, Any]) -> None:
        """`check` with what the config.json of a target says."""
        inner = config.get("text_config")
        parts = [part for part in (inner, config) if isinstance(part, Mapping)]

        def said(names: tuple[str, ...]) -> int | None:
            values = (part[name] for part in parts for name in names if name in part)
            return next((value for value in values if type(value) is int), None)

        self.check(said(WIDTHS), said(DEPTHS), said(("vocab_size",)))


class Stored:
    """The tensors of a drafter's directory under the names that its kind has for them.

    own_name: of a tensor, from its name in the file. unread: own names of what is passed over.
    Raises CheckpointError for files that are damaged.
    """

    def __init__(
        self, directory: Path, own_name: Callable[[str], str], unread: Collection[str] = ()
    ) -> None:
        self.directory = directory
        self._weights = Weights(directory)
        named = {own_name(name): name for name in self._weights.infos}
        self._names = {own: name for own, name in named.items() if own not in (*UNREAD, *unread)}
        self.shapes = {own: self._weights.infos[name].shape for own, name in self._names.items()}

    def check(self, needed: Shapes, optional: Shapes) -> None:
        """Raises CheckpointError for the first tensor missing, left over, or of another shape."""
        present = {name: shape for name, shape in optional.items() if name in self.shapes}
        try:
            check_weights({**needed, **present}, self.shapes)
        except CheckpointError as problem:
            raise CheckpointError(f"{self.directory}: {problem}") from None
        for own, name in self._names.items():
            info = self._weights.infos[name]
            if own != "d2t" and not mx.issubdtype(DTYPES[info.dtype], mx.floating):
                raise CheckpointError(
                    f"{self.directory} stores {name} as {info.dtype}: a drafter's weights are "
                    "floats"
                )

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """The target's token for each of `count` of the drafter's: d2t says how far it is off."""
        if "d2t" not in self._names:
            return None
        offsets = np.array(self._weights.read(self._names["d2t"])).astype(np.int64)
        ids = np.arange(count) + offsets
        if outside := [int(one) for one in ids if not 0 <= one < vocabulary]:
            raise CheckpointError(
                f"{self.directory} has a d2t that leads to token {outside[0]}, and the target has "
                f"{vocabulary}: the drafter is damaged, or belongs to another target"
            )
        if len(np.unique(ids)) < count:
            raise CheckpointError(
                f"{self.directory} has a d2t that leads to one token twice: the drafter is damaged"
            )
        return tuple(ids.tolist())

    def read(self) -> dict[str, mx.array]:
        """All but d2t, lazily."""
        names = ((own, name) for own, name in self._names.items() if own != "d2t")
        return {own: self._weights.read(name) for own, name in names}
