"""EAGLE-3 in its three dialects: the authors' own, that of `speculators`, and SpecForge's.

Source: Li et al., arXiv 2503.01840, and the files that the authors, vLLM and SGLang read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError
from ..base import Base
from .files import SpeculatorFiles, StoredTensors
from .layers import Layer
from .network import Chain
from .sizes import LayerSizes, Settings, Shapes, described, is_named

IDS = "eagle_aux_hidden_state_layer_ids"
USUAL_TAPS = 3
MoreShapes = Callable[[StoredTensors, int], Shapes]


@dataclass(frozen=True)
class Eagle3Files(SpeculatorFiles):
    """norm_before_residual: what the first layer adds to is normed. norms_before_head: logits are
    made of what the last norm puts out. feeds_back_normed: so is the next step's feature."""

    sizes: LayerSizes
    norm_before_residual: bool
    norms_before_head: bool
    feeds_back_normed: bool

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """Inputs of a low, a middle and a high layer, which are the outputs before them."""
        return (1, layers // 2 - 1, layers - 4)


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is an EAGLE-3."""
    if "mask_hidden" in names:
        return False
    own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
    return is_named(config, r"\w*Eagle3\w*") or not own.isdisjoint(names)


def read(
    kind: str, directory: Path, config: Mapping[str, Any], more: MoreShapes | None = None
) -> Eagle3Files:
    """See `speculators.read`. more: tensors that a kind has beside those of EAGLE-3, from how many
    numbers stand side by side."""
    settings, sizes, nested = described(directory, config)
    if "sliding_attention" in str(settings.get("layer_types")):
        raise settings.wrong("layer_types", "full_attention for each layer of an EAGLE-3")
    stored = StoredTensors.of(directory, _own_name)
    width = sizes.width
    target_width = settings.whole("target_hidden_size", width)
    features = _columns(stored, "fc.weight")
    stored.check_layers(max(sizes.count, features // target_width))
    taps = max(1, features // target_width)
    vocabulary = settings.whole("vocab_size", 32000 if nested else None)
    drafted = settings.whole("draft_vocab_size", vocabulary)
    needed, optional = _shapes(sizes, features, target_width, vocabulary, drafted)
    stored.check(needed | (more(stored, features) if more else {}), optional)
    if features != taps * target_width:
        raise CheckpointError(
            f"{directory} reads hidden states of {features} numbers, which are no multiple of the "
            f"target's width {target_width}: its config.json belongs to another drafter"
        )
    lent = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in stored.shapes]
    if width != target_width and lent:
        raise CheckpointError(
            f"{directory} has width {width} and its target {target_width}, and brings no "
            f"{lent[0]} of its own: the drafter is not complete"
        )
    return Eagle3Files(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=_tapped(settings, config),
        taps=taps,
        target_width=target_width,
        vocabulary=vocabulary,
        target_ids=stored.target_ids(drafted, vocabulary),
        tensors=stored,
        norm_before_residual=settings.flag("norm_before_residual", False),
        # One name, two meanings.
        norms_before_head=nested or settings.flag("norm_output", True),
        feeds_back_normed=nested and settings.flag("norm_output", False),
    )


def expected(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """The tensors of such a drafter, as far as config.json tells."""
    settings, sizes, nested = described(directory, config)
    target_width = settings.whole("target_hidden_size", sizes.width)
    vocabulary = settings.whole("vocab_size", 32000 if nested else None)
    drafted = settings.whole("draft_vocab_size", vocabulary)
    taps = len(_tapped(settings, config) or (0,) * USUAL_TAPS)
    needed, _ = _shapes(sizes, taps * target_width, target_width, vocabulary, drafted)
    lent = {"embed_tokens.weight": (vocabulary, sizes.width)}
    if drafted == vocabulary:
        lent["lm_head.weight"] = (drafted, sizes.width)
    return needed if sizes.width == target_width else needed | lent


def _tapped(settings: Settings, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose outputs are read. The key decides how they are counted: on its own it names
    layers by their inputs; inside of eagle_config, and as DeepSpec calls it, by their outputs."""
    if (by_input := settings.ids(IDS)) is not None:
        return tuple(layer - 1 for layer in by_input)
    inside = Settings(settings.file, config.get("eagle_config")).ids(IDS)
    return settings.ids("target_layer_ids") if inside is None else inside


def _own_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _columns(stored: StoredTensors, name: str) -> int:
    shape = stored.shapes.get(name, ())
    if len(shape) != 2:
        raise CheckpointError(f"{stored.directory} has no matrix {name}: it is no whole EAGLE-3")
    return shape[1]


def _shapes(
    sizes: LayerSizes, features: int, target_width: int, vocabulary: int, drafted: int
) -> tuple[Shapes, Shapes]:
    """What there has to be, and what there may be."""
    width = sizes.width
    needed: Shapes = {
        "fc.weight": (width, features),
        "layers.0.hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **sizes.before_layers(),
    }
    optional: Shapes = {
        "fc.bias": (width,),
        "embed_tokens.weight": (vocabulary, width),
        "input_norm.weight": (features,),
    }
    own = {"lm_head.weight": (drafted, width), "d2t": (drafted,)}
    (needed if drafted != vocabulary else optional).update(own)
    for number in range(features // target_width):
        optional[f"fc_norm.{number}.weight"] = (target_width,)
    for number in range(sizes.count):
        # The first layer sees the token's embedding beside the hidden state.
        needed |= sizes.shapes(number, 2 * width if number == 0 else width)
        optional |= sizes.optional(number)
    return needed, optional


class FirstLayer(Layer):
    """The layer that sees each token's embedding beside the hidden state before it."""

    def __init__(self, sizes: LayerSizes, present: Collection[str], norm_before_residual: bool):
        super().__init__(sizes, 0, 2 * sizes.width, present)
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self._norm_before_residual = norm_before_residual

    def inputs(self, embedded: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """What is added to, and what queries, keys and values are made of."""
        normed = self.hidden_norm(states)
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return (normed if self._norm_before_residual else states), both


class Eagle3(Chain):
    """The network of a directory."""

    def __init__(self, files: Eagle3Files, target: Base) -> None:
        super().__init__(files, target)
        sizes, present = files.sizes, files.tensors
        first = FirstLayer(sizes, present, files.norm_before_residual)
        others = [Layer(sizes, each, sizes.width, present) for each in range(1, sizes.count)]
        self.layers = [first, *others]
        if "input_norm.weight" in present:
            self.input_norm = nn.RMSNorm(files.taps * files.target_width, sizes.eps)
        if "fc_norm.0.weight" in present:
            self.fc_norm = [nn.RMSNorm(files.target_width, sizes.eps) for _ in range(files.taps)]
        self._norms_before_head = files.norms_before_head
        self._feeds_back_normed = files.feeds_back_normed

    def features(self, hidden: mx.array) -> mx.array:
        """As Chain says."""
        hidden = hidden.astype(self.dtype)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        states: mx.array = self.fc(hidden)
        return states

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says."""
        both: tuple[mx.array, mx.array] = self.layers[0].inputs(self.embed(tokens), states)
        return both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says."""
        normed = self.norm(states)
        head = normed if self._norms_before_head else states
        return head, normed if self._feeds_back_normed else states


network = Eagle3
