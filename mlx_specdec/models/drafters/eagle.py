"""EAGLE in four forms. EAGLE-1, EAGLE-2 and HASS: a layer on the inputs of the target's head; they
differ in how they were trained, and in the trees that they were made for; their files do not.
EAGLE-3: a layer on several hidden states, in three dialects: the authors' own, that of
`speculators`, and SpecForge's. P-EAGLE: an EAGLE-3 that drafts all its tokens in one pass. Source:
arXiv 2401.15077 and 2406.16858 (Li et al.), 2408.15766 (HASS), 2503.01840 (EAGLE-3), 2602.01469
(P-EAGLE), and the files that the authors, vLLM and SGLang read."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from .files import (
    Description,
    DrafterFiles,
    LayerSizes,
    Settings,
    StoredTensors,
    is_named,
    layer_sizes,
)
from .layers import Layer
from .network import Chain, Config, Kind, Reading

UNUSED = ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""The target's own, which some files repeat, since training leaves both as they are; and the
frequencies of positions, which config.json tells."""
IDS = "eagle_aux_hidden_state_layer_ids"
USUAL_TAPS = 3
USUAL_VOCABULARY = 32000
MASK = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""The mask token's name in the files of `speculators`, AMD and Amazon."""
USUAL_DEPTHS = 8
"""Tokens drafted at once where nothing says how many."""


def _own_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def is_eagle(config: Config, names: Collection[str]) -> bool:
    """Return whether this is EAGLE-1, EAGLE-2 or HASS: only tensors tell."""
    known = {_own_name(name) for name in names}
    absent = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= known and known.isdisjoint(absent)


def read_eagle(directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
    settings = Settings(directory / "config.json", config)
    sizes = layer_sizes(settings, None)
    return DrafterFiles(
        directory=directory,
        kind="eagle",
        sizes=sizes,
        target_width=sizes.width,
        vocabulary=int(settings["vocab_size"]),
        tensors=StoredTensors.of(directory, weights, _own_name, UNUSED),
    )


class Eagle(Chain):
    """The network of a directory. Its first layer has no norm: it is given the output of fc."""

    normed = False

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        sizes, present = files.sizes, files.tensors
        self.layers = [
            Layer(sizes, number, sizes.width, present, normed=number > 0)
            for number in range(sizes.count)
        ]

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        both: mx.array = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        return both, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        return states, states


@dataclass(frozen=True, kw_only=True)
class Eagle3Files(DrafterFiles):
    """norm_before_residual: the residual of the first layer is normed. norms_before_head: logits
    are made of the output of the last norm. feeds_back_normed: so is the next step's feature."""

    norm_before_residual: bool
    norms_before_head: bool
    feeds_back_normed: bool

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The inputs of a low, a middle and a high layer, which are the outputs before them."""
        return (1, layers // 2 - 1, layers - 4)


def is_eagle3(config: Config, names: Collection[str]) -> bool:
    if MASK in names:
        return False
    own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
    return is_named(config, r"\w*Eagle3\w*") or not own.isdisjoint(names)


def read_eagle3(
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


@dataclass(frozen=True, kw_only=True)
class PEagleFiles(Eagle3Files):
    """mask_token: stands for a token that is not known. depths: tokens that it learned to draft."""

    mask_token: int
    depths: int


def is_peagle(config: Config, names: Collection[str]) -> bool:
    # An EAGLE-3 masks no token.
    masks = any(config.get(name) is not None for name in MASK_TOKENS)
    return MASK in names or (masks and is_eagle3(config, names))


def read_peagle(directory: Path, config: Config, weights: Weights | None) -> PEagleFiles:
    chain = read_eagle3(directory, config, weights, "peagle")
    stated = config.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, Mapping) else None
    layer = config.get("transformer_layer_config")
    settings = Settings(directory / "config.json", config, layer, methods and methods[0])
    name = next((each for each in MASK_TOKENS if each in settings), MASK_TOKENS[0])
    depths = max(1, int(settings.get("speculative_tokens", USUAL_DEPTHS)))
    mask_token = settings.token(name, chain.vocabulary)
    return PEagleFiles(**vars(chain), mask_token=mask_token, depths=depths)


class PEagle(Eagle3):
    """The network of a directory."""

    def __init__(self, files: PEagleFiles) -> None:
        super().__init__(files)
        # Some files have an axis of size 1 more or less.
        axes = len(files.tensors.shapes.get(MASK, (1, 1, 1)))
        self.mask_hidden = mx.zeros((1,) * (axes - 1) + (files.inputs,))
        self.mask_token = files.mask_token
        self.most = files.depths

    def open(self) -> Reading:
        return PEagleReading(self)


class PEagleReading(Reading):
    """One sequence. What is read waits for the next guess, so that both are one pass."""

    _newest: mx.array
    _logits: mx.array
    _index: int

    def __init__(self, network: PEagle) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._waiting: tuple[mx.array, mx.array] | None = None

    @property
    def length(self) -> int:
        return super().length + (0 if self._waiting is None else self._waiting[1].shape[1])

    def read(self, hidden: mx.array, following: mx.array) -> None:
        self._see(0)
        self._waiting = hidden.astype(self._network.dtype), following

    def guess(self, count: int) -> mx.array:
        masked = self._see(count - 1)
        network, states = self._network, mx.concatenate([self._newest, masked], axis=1)
        self._logits = network.over_target(network.own_logits(states))
        self._index = 0
        return self._logits[:, :1]

    def guess_after(self, token: mx.array) -> mx.array:
        self._index += 1
        return self._logits[:, self._index : self._index + 1]

    def evaluate(self) -> None:
        self._see(0)
        super().evaluate()

    def _see(self, masked: int) -> mx.array:
        """Run what waits, and `masked` places behind it, for which the inputs of the head, (1,
        masked, width), are returned."""
        network, waiting = self._network, self._waiting
        tokens = mx.full((1, masked), network.mask_token, dtype=mx.int32)
        hidden = mx.repeat(network.mask_hidden.reshape(1, 1, -1), masked, axis=1)
        if waiting is not None:
            hidden = mx.concatenate([waiting[0], hidden], axis=1)
            tokens = mx.concatenate([waiting[1], tokens], axis=1)
            self._waiting = None
        rows = tokens.shape[1]
        if rows == 0:
            return mx.zeros((1, 0, network.norm.weight.size), dtype=network.dtype)
        offset = self._rows.advance(tokens, masked).starts[0]
        head, _ = network.step(
            tokens, network.features(hidden), self._caches, offset, self._sources
        )
        if rows > masked:
            self._newest = head[:, rows - masked - 1 : rows - masked]
        return head[:, rows - masked :]


EAGLE = Kind("eagle", is_eagle, read_eagle, Eagle, by_speculators=False)
EAGLE3 = Kind("eagle3", is_eagle3, read_eagle3, Eagle3, layer_ids=IDS)
PEAGLE = Kind("peagle", is_peagle, read_peagle, PEagle, layer_ids=IDS)
