"""EAGLE-3 in its three dialects: the authors' own, that of `speculators`, and SpecForge's. Source:
Li et al., arXiv 2503.01840, and the files that the authors, vLLM and SGLang read."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from .config import Description, LayerSizes, is_named
from .files import DrafterFiles, StoredTensors
from .layers import Layer
from .network import Chain, Config, Kind

IDS = "eagle_aux_hidden_state_layer_ids"
USUAL_TAPS = 3
USUAL_VOCABULARY = 32000


@dataclass(frozen=True, kw_only=True)
class Eagle3Files(DrafterFiles):
    """norm_before_residual: the residual of the first layer is normed. norms_before_head: logits
    are made of the output of the last norm. feeds_back_normed: so is the feature of the next step.
    """

    norm_before_residual: bool
    norms_before_head: bool
    feeds_back_normed: bool

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The inputs of a low, a middle and a high layer, which are the outputs before them."""
        return (1, layers // 2 - 1, layers - 4)


def recognizes(config: Config, names: Collection[str]) -> bool:
    if "mask_hidden" in names:
        return False
    own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
    return is_named(config, r"\w*Eagle3\w*") or not own.isdisjoint(names)


def read(
    directory: Path, config: Config, weights: Weights | None, kind: str = "eagle3"
) -> Eagle3Files:
    described = Description.of(directory, config, USUAL_VOCABULARY)
    settings, sizes = described.settings, described.sizes
    if "sliding_attention" in str(settings.get("layer_types")):
        raise settings.wrong("layer_types", "full_attention for each layer of an EAGLE-3")
    stored = StoredTensors.of(directory, weights, _own_name)
    target_width = int(settings.get("target_hidden_size", sizes.width))
    tapped = settings.tapped(IDS)
    return Eagle3Files(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=tapped,
        taps=stored.taps(target_width, len(tapped or (0,) * USUAL_TAPS)),
        target_width=target_width,
        vocabulary=described.vocabulary,
        target_ids=stored.target_ids(described.drafted, described.vocabulary),
        tensors=stored,
        norm_before_residual=bool(settings.get("norm_before_residual")),
        # One name, two meanings.
        norms_before_head=described.layered or bool(settings.get("norm_output", True)),
        feeds_back_normed=described.layered and bool(settings.get("norm_output")),
    )


def _own_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


class FirstLayer(Layer):
    """The layer that sees each token's embedding beside the hidden state before it."""

    def __init__(self, sizes: LayerSizes, present: Collection[str], norm_before_residual: bool):
        super().__init__(sizes, 0, 2 * sizes.width, present)
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self._norm_before_residual = norm_before_residual

    def inputs(self, embedded: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """Return the residual, and the inputs of queries, keys and values."""
        normed = self.hidden_norm(states)
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return (normed if self._norm_before_residual else states), both


class Eagle3(Chain):
    """The network of a directory."""

    def __init__(self, files: Eagle3Files) -> None:
        super().__init__(files)
        sizes, present = files.sizes, files.tensors
        if sizes.width != files.target_width:  # what the target has does not fit
            self.embed_tokens = nn.Embedding(files.vocabulary, sizes.width)
            self.lm_head = nn.Linear(sizes.width, files.drafted, bias=False)
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
        both: tuple[mx.array, mx.array] = self.layers[0].inputs(self.embed(tokens), states)
        return both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        normed = self.norm(states)
        head = normed if self._norms_before_head else states
        return head, normed if self._feeds_back_normed else states


EAGLE3 = Kind("eagle3", recognizes, read, Eagle3, layer_ids=IDS)
