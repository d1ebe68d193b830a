"""The stored form of a hidden-state drafter: the entries of its config.json, its tensors, and the
target that it needs. Invalid values may raise any exception here; `kinds.read` turns each into a
CheckpointError."""

import re
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...checkpoints.disk import read_json
from ...checkpoints.files import Weights, whole_number
from ...checkpoints.quantization import PARTS, Quantization, stored_quantization
from ...checkpoints.tensors import MOST_LAYERS
from ...errors import CheckpointError
from ..loading import is_encoder_decoder

Shapes = dict[str, tuple[int, ...]]
ATTENDS = "encoder_attention"
"""Entry of config.json: whether layers attend to the target's encoder. This entry and
encoder_hidden_size are specific to this package, because no other program has drafters for
encoder-decoder models."""
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "head_dim"),
)
D2T = "d2t"
"""For each token of the drafter, the target's id minus the drafter's."""
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that are not read: they repeat d2t, or only training needs them."""
IN_16_BITS = ("fc", "confidence_head.proj")
"""Modules that are never quantized: all hidden states of the target pass through `fc`, and the
projection of the confidence head is only one row."""


class ConfigEntries(dict[str, Any]):
    """The merged entries of several parts of one config.json, without nulls. If several parts have
    an entry, the first part counts. Looking up a missing entry raises CheckpointError."""

    def __init__(self, file: Path, *parts: object) -> None:
        super().__init__()
        self.file = file
        for part in reversed(parts):
            if isinstance(part, Mapping):
                self.update((name, value) for name, value in part.items() if value is not None)

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"{self.file} has no {name}")

    @property
    def layered(self) -> bool:
        """Whether a separate part describes the layers, as the package `speculators` writes."""
        return isinstance(self.get("transformer_layer_config"), Mapping)

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers; None if it is missing or empty, as in templates."""
        return tuple(map(int, self.get(name, ()))) or None

    def hidden_layers(self, by_input: str) -> tuple[int, ...] | None:
        """Return the target's layers whose outputs are read. The entry `by_input` lists layers
        whose inputs are read. The same entry inside eagle_config, and the entry target_layer_ids,
        list layers whose outputs are read."""
        if (layers := self.ids(by_input)) is not None:
            return tuple(layer - 1 for layer in layers)
        inside = ConfigEntries(self.file, self.get("eagle_config")).ids(by_input)
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
    """The sizes of a drafter and of its transformer layers, which have Llama's or Qwen 3's form. A
    kind whose layers mlx-lm computes sets only `width` and `eps`.

    Attributes:
        interleaved: Whether neighboring entries are rotated as a pair.
        encoder_width: Width of the output of the target's encoder, if layers attend to it.
    """

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


def layer_sizes(settings: ConfigEntries, model_type: object) -> LayerSizes:
    """Return the sizes of a drafter's layers. Missing sizes have the defaults of `model_type`,
    unless that is None. Raises CheckpointError if an entry is missing or not supported."""
    if model_type in ("llama", "qwen3") and not settings.keys() >= {*_SHAPE}:
        from transformers import AutoConfig  # `speculators` omits entries with default values

        stated = {name: settings[name] for name in _SHAPE if name in settings}
        defaults = AutoConfig.for_model(model_type, **stated)
        settings = ConfigEntries(
            settings.file, settings, {name: getattr(defaults, name) for name in _SHAPE}
        )
    for name, usual in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
        if settings.get(name, usual) != usual:
            raise settings.wrong(name, str(usual))
    width, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    positions = settings.get("rope_parameters") or settings.get("rope_scaling")
    if isinstance(positions, Mapping) and "sliding_attention" in positions:
        # The target's positions, by kind of attention. In a drafter of `speculators`, all layers
        # have the positions of sliding attention.
        positions = positions["sliding_attention"]
    rope = ConfigEntries(settings.file, positions)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.wrong("rope_type", "default, linear, llama3 or yarn")
    encoder_width = None
    if settings.get(ATTENDS):
        target_width = settings.get("target_hidden_size", width)
        encoder_width = int(settings.get("encoder_hidden_size", target_width))
    return LayerSizes(
        count=whole_number(settings, "num_hidden_layers", most=MOST_LAYERS),
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


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("dflash_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def is_named(config: Mapping[str, Any], pattern: str) -> bool:
    listed = config.get("architectures")
    return isinstance(listed, list) and any(re.fullmatch(pattern, str(name)) for name in listed)


class StoredTensors(UserDict[str, Any]):
    """The tensors of a drafter, by the names that its kind gives them, without d2t. A tensor is
    read when it is looked up, and lazily if the format allows it.

    Attributes:
        names: The name of each tensor in the files, including d2t.
        shapes: The shape of each tensor; for quantized matrices, the shape before quantization.
        quantized: The quantization of each quantized matrix, by path.
    """

    def __init__(
        self,
        directory: Path,
        weights: Weights | None = None,
        own_name: Callable[[str], str] = str,
        unused: Collection[str] = (),
    ) -> None:
        """Open the tensors of a directory, or none if `weights` is None. `own_name` returns the
        kind's name of a stored tensor. Tensors whose names are in `unused` are left out. Raises
        CheckpointError if the quantization cannot be read."""
        super().__init__()
        self._directory = directory
        self._d2t: Callable[[], mx.array] | None = None
        self.names: dict[str, str] = {}
        self.shapes: Shapes = {}
        self.quantized: dict[str, Quantization] = {}
        if weights is None:
            return
        left_out, infos = {*UNUSED, *unused}, weights.infos
        pairs = ((own_name(name), name) for name in infos)
        self.names = names = {key: name for key, name in pairs if key not in left_out}
        self.data = {key: partial(weights.read, name) for key, name in names.items()}
        self._d2t = self.data.pop(D2T, None)
        try:
            entry = stored_quantization(read_json(directory / "config.json"))
        except CheckpointError as problem:
            raise CheckpointError(f"{directory}: {problem}") from None
        paths = [key.removesuffix(".scales") for key in names if key.endswith(".scales")]
        if entry is not None:
            self.quantized = {path: Quantization.of(entry, path) for path in paths}
        parts = {D2T, *(f"{path}.{part}" for path in self.quantized for part in PARTS)}
        self.shapes = {key: infos[name].shape for key, name in names.items() if key not in parts}
        for path, how in self.quantized.items():
            *rows, groups = infos[names[f"{path}.scales"]].shape
            self.shapes[f"{path}.weight"] = (*rows, groups * how.group_size)

    def __getitem__(self, name: str) -> mx.array:
        return self.data[name]()

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """Return the target's token for each of `count` tokens of the drafter, or None if both
        vocabularies are the same. Raises CheckpointError."""
        if self._d2t is None:
            if count == vocabulary:
                return None
            if self.shapes:
                raise CheckpointError(f"{self._directory}: weight d2t is missing: download again")
            return tuple(range(count))
        offsets = np.array(self._d2t()).astype(np.int64).reshape(count)
        ids = np.arange(count) + offsets
        if outside := [int(token) for token in ids if not 0 <= token < vocabulary]:
            raise CheckpointError(
                f"{self._directory} has a d2t that leads to token {outside[0]}, and the target has "
                f"{vocabulary}: the drafter is damaged, or belongs to another target"
            )
        return tuple(ids.tolist())


def check_sizes(
    drafter: Path, width: tuple[int, int | None], vocabulary: tuple[int | None, int | None]
) -> None:
    """Raise CheckpointError if a drafter was made for another target. width, vocabulary: The size
    that the drafter needs, and the target's. A size that is not known is not compared."""
    parts = {"hidden states of width": width, "a vocabulary of": vocabulary}
    for what, (wanted, actual) in parts.items():
        if None not in (wanted, actual) and wanted != actual:
            raise CheckpointError(
                f"{drafter} drafts for a target with {what} {wanted}, and this one has {actual}: "
                "it belongs to another target"
            )


UsualLayers = Callable[[int, int], tuple[int, ...]]
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_DEPTHS = ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""Names of the width and of the number of decoder layers in the config.json of target models."""


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """A hidden-state drafter in a directory.

    Attributes:
        kind: The drafter's name in the table of kinds.
        settings: The entries of config.json.
        hidden_layers: The target's layers, counted from 0, whose outputs the drafter reads, in the
            order in which it concatenates them; None for the kind's default layers.
        hidden_count: Number of these layers.
        target_width: Width of the target's hidden states.
        vocabulary: Size of the target's vocabulary.
        target_ids: The target's token for each token of the drafter; None if both vocabularies are
            the same.
        tensors: The tensors, whose shapes were checked.
        usual_layers: The kind's default layers, from the number of hidden states and of the
            target's layers.
    """

    directory: Path
    kind: str
    settings: ConfigEntries
    sizes: LayerSizes
    hidden_layers: tuple[int, ...] | None = ()
    hidden_count: int = 0
    target_width: int
    vocabulary: int
    target_ids: tuple[int, ...] | None = None
    tensors: StoredTensors
    usual_layers: UsualLayers = lambda count, layers: ()

    @property
    def drafted(self) -> int:
        """The size of the drafter's vocabulary."""
        return self.vocabulary if self.target_ids is None else len(self.target_ids)

    @property
    def inputs(self) -> int:
        """Width of the inputs of `fc`: all hidden states side by side; without any, one hidden
        state and a token's embedding."""
        return (self.hidden_count or 2) * self.target_width

    def facts(self) -> dict[str, Any]:
        """Return the facts that the command `inspect` reports."""
        return {
            "kind": self.kind,
            "target_hidden_size": self.target_width,
            "target_vocab_size": self.vocabulary,
            "draft_vocab_size": self.drafted,
            "target_layers": None if self.hidden_layers is None else list(self.hidden_layers),
            "hidden_count": self.hidden_count,
            "encoder_hidden_size": self.sizes.encoder_width,
        }

    def hidden_layers_of(self, layers: int) -> tuple[int, ...]:
        """Return the layers to read of a target with `layers` layers. Raises CheckpointError."""
        named = self.hidden_layers
        if named is None:
            named = self.usual_layers(self.hidden_count, layers)
        if len(named) != self.hidden_count:
            raise CheckpointError(
                f"{self.directory} reads {self.hidden_count} hidden states side by side, and names "
                f"{len(named)} layers of the target: its config.json belongs to another drafter"
            )
        if wrong := [layer for layer in named if not 0 <= layer < layers]:
            raise CheckpointError(
                f"{self.directory} reads what layer {wrong[0]} of the target puts out, and the "
                f"target has layers 0 to {layers - 1}: the drafter belongs to another target"
            )
        return named

    def check_encoder(self, width: int | None) -> None:
        """Raise CheckpointError if the target's encoder is not the one that the drafter was made
        for. width: Width of the encoder's output; None for decoder-only targets."""
        expected = self.sizes.encoder_width
        # The entry speculators_config has the architecture of the target.
        decodes = "ForCausalLM" in str(self.settings.get("speculators_config"))
        stated = expected is not None or decodes or self.settings.get(ATTENDS) is False
        if expected == width or not stated:
            return
        wanted = (
            "without an encoder" if expected is None else f"with an encoder of width {expected}"
        )
        actual = "is decoder-only" if width is None else f"has an encoder of width {width}"
        raise CheckpointError(
            f"{self.directory} drafts for a target {wanted}, and this one {actual}: the drafter "
            "belongs to another target"
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the config.json of a target does not fit the drafter."""
        inner = config.get("text_config"), config.get("decoder"), config
        parts = [part for part in inner if isinstance(part, Mapping)]

        def stated(names: tuple[str, ...]) -> int | None:
            values = (part[name] for part in parts for name in names if name in part)
            return next((value for value in values if type(value) is int), None)

        widths, vocabulary = (self.target_width, stated(_WIDTHS)), stated(("vocab_size",))
        check_sizes(self.directory, widths, (self.vocabulary, vocabulary))
        if (layers := stated(_DEPTHS)) is not None:
            self.hidden_layers_of(layers)
        self.check_encoder(stated(_WIDTHS) if is_encoder_decoder(config) else None)


def read_layers(
    kind: str,
    directory: Path,
    config: Mapping[str, Any],
    weights: Weights | None,
    *,
    own_name: Callable[[str], str],
    ids: str,
    usual_count: int,
    usual_layers: UsualLayers,
    usual_vocabulary: int,
    copies: Collection[str] = (),
) -> DrafterFiles:
    """Open a drafter with Llama's or Qwen 3's layers.

    Args:
        kind, directory, config, weights, own_name: See `DrafterFiles`, `DrafterNetwork.read` and
            `StoredTensors`.
        ids: The entry that lists the target's layers whose inputs are read.
        usual_count, usual_layers: The default number and choice of the target's layers.
        usual_vocabulary: Size of the target's vocabulary if a file of `speculators` lacks it.
        copies: Tensors that are copies of the target's if both have the same vocabulary.
    Raises:
        CheckpointError: If an entry is missing or not supported.
    """
    file, inner = directory / "config.json", config.get("transformer_layer_config")
    methods = ConfigEntries(file, config.get("speculators_config")).get("proposal_methods")
    parts = config.get("dflash_config"), inner, config, methods and methods[0]
    settings = ConfigEntries(file, *parts)
    sizes = layer_sizes(settings, ConfigEntries(file, inner).get("model_type"))
    if settings.layered:
        settings.setdefault("vocab_size", usual_vocabulary)
    vocabulary = int(settings["vocab_size"])
    drafted = int(settings.get("draft_vocab_size", vocabulary))
    unused = {*copies} - ({"lm_head.weight"} if drafted != vocabulary else set())
    stored = StoredTensors(directory, weights, own_name, unused)
    hidden_layers = settings.hidden_layers(ids)
    target_width = int(settings.get("target_hidden_size", sizes.width))
    hidden_count = len(hidden_layers or range(usual_count))
    if stored.shapes:
        hidden_count = max(1, stored.shapes["fc.weight"][1] // target_width)
    return DrafterFiles(
        directory=directory,
        kind=kind,
        settings=settings,
        sizes=sizes,
        hidden_layers=hidden_layers,
        hidden_count=hidden_count,
        target_width=target_width,
        vocabulary=vocabulary,
        target_ids=stored.target_ids(drafted, vocabulary),
        tensors=stored,
        usual_layers=usual_layers,
    )
