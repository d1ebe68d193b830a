"""The EAGLE drafters. EAGLE-1, EAGLE-2 and HASS have a layer on the inputs of the target's head.
They differ in training and in their draft trees, but not in their files. EAGLE-3 has a layer on
several hidden states; the authors, `speculators` and SpecForge write different files. P-EAGLE is an
EAGLE-3 that drafts all its tokens in one pass. Source: arXiv 2401.15077 and 2406.16858 (Li et al.),
2408.15766 (HASS), 2503.01840 (EAGLE-3), 2602.01469 (P-EAGLE), and the files that the authors, vLLM
and SGLang read."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from .files import ConfigEntries, DrafterFiles, StoredTensors, is_named, layer_sizes, read_layers
from .layers import DrafterLayer
from .network import ChainContext, Config, DrafterContext, DrafterNetwork, gathered

EAGLE_UNUSED = ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""Tensors that are not read: copies of the target's embedding and head, which training does not
change, and the rotary frequencies, which config.json determines."""
MASK_HIDDEN = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""The mask token's name in the files of `speculators`, AMD and Amazon."""


def _own_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


class Eagle(DrafterNetwork):
    """The network of an EAGLE-1, EAGLE-2 or HASS. Its first layer begins without a norm."""

    by_speculators = normed = False

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        """Return whether this is EAGLE-1, EAGLE-2 or HASS. Only the tensors' names show it."""
        own_names = {_own_name(name) for name in names}
        present = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
        absent = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
        return present <= own_names and own_names.isdisjoint(absent)

    @staticmethod
    def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
        settings = ConfigEntries(directory / "config.json", config)
        sizes = layer_sizes(settings, None)
        return DrafterFiles(
            directory=directory,
            kind=kind,
            settings=settings,
            sizes=sizes,
            target_width=sizes.width,
            vocabulary=int(settings["vocab_size"]),
            tensors=StoredTensors(directory, weights, _own_name, EAGLE_UNUSED),
        )

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        layers = range(files.sizes.count)
        self.layers = [DrafterLayer(files, number, normed=number > 0) for number in layers]

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        both: mx.array = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        return both, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        return states, states


class Eagle3(DrafterNetwork):
    """The network of an EAGLE-3. The attention of the first layer reads each token's embedding,
    concatenated with the hidden state of the position before it.

    Attributes:
        norms_before_head: Whether the head reads the output of the last norm.
        feeds_back_normed: Whether the next step reads the output of the last norm.
    """

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        if MASK_HIDDEN in names:
            return False
        norms = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return is_named(config, r"\w*Eagle3\w*") or not norms.isdisjoint(names)

    @staticmethod
    def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
        files = read_layers(
            kind,
            directory,
            config,
            weights,
            own_name=_own_name,
            ids="eagle_aux_hidden_state_layer_ids",
            usual_count=3,
            # The layers before a low, a middle and a high layer, whose inputs are read.
            usual_layers=lambda count, layers: (1, layers // 2 - 1, layers - 4),
            usual_vocabulary=32000,  # Llama 2's
        )
        if "sliding_attention" in str(files.settings.get("layer_types")):
            raise files.settings.wrong("layer_types", "full_attention for each layer of an EAGLE-3")
        return files

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        sizes, present, settings = files.sizes, files.tensors, files.settings
        if sizes.width != files.target_width:  # the target's embedding and head do not fit
            self.embed_tokens = nn.Embedding(files.vocabulary, sizes.width)
            self.lm_head = nn.Linear(sizes.width, files.drafted, bias=False)
        self.layers = [
            DrafterLayer(files, number, sizes.width if number else 2 * sizes.width)
            for number in range(sizes.count)
        ]
        self.layers[0].hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self._norms_residual = bool(settings.get("norm_before_residual"))
        if "input_norm.weight" in present:
            self.input_norm = nn.RMSNorm(files.hidden_count * files.target_width, sizes.eps)
        if "fc_norm.0.weight" in present:
            norms = range(files.hidden_count)
            self.fc_norm = [nn.RMSNorm(files.target_width, sizes.eps) for _ in norms]
        # "norm_output" has another meaning in the files of `speculators` than in other files.
        self.norms_before_head = settings.layered or bool(settings.get("norm_output", True))
        self.feeds_back_normed = settings.layered and bool(settings.get("norm_output"))

    def features(self, hidden: mx.array) -> mx.array:
        hidden = hidden.astype(self.dtype)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        return self.fc(hidden)

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        normed = self.layers[0].hidden_norm(states)
        embedded = self.layers[0].input_layernorm(self.embed(tokens))
        both = mx.concatenate([embedded, normed], axis=-1)
        return normed if self._norms_residual else states, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        normed = self.norm(states)
        head = normed if self.norms_before_head else states
        return head, normed if self.feeds_back_normed else states


class PEagle(Eagle3):
    """The network of a P-EAGLE. `mask_token` is the input token of positions whose token is not
    known yet."""

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        # The files of an EAGLE-3 name no mask token.
        masks = any(config.get(name) is not None for name in MASK_TOKENS)
        return MASK_HIDDEN in names or (masks and Eagle3.recognizes(config, names))

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        settings = files.settings
        # The number of leading axes of size 1 differs among files.
        axes = len(files.tensors.shapes.get(MASK_HIDDEN, (1, 1, 1)))
        self.mask_hidden = mx.zeros((1,) * (axes - 1) + (files.inputs,))
        name = next((entry for entry in MASK_TOKENS if entry in settings), MASK_TOKENS[0])
        self.mask_token = settings.token(name, files.vocabulary)
        self.most = int(settings.get("speculative_tokens", 8))

    def open(self, count: int = 1) -> DrafterContext:
        return PEagleContext(self, count)


class PEagleContext(ChainContext):
    """The rows of a group in a P-EAGLE. Waiting hidden states are processed in the pass that drafts
    all tokens."""

    _network: PEagle

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        network, masked = self._network, count - 1
        tokens = self._advance(following, [network.mask_token] * masked)
        ends = mx.array([len(row) for row in following])[:, None, None]
        hidden = mx.pad(hidden.astype(network.dtype), [(0, 0), (0, masked), (0, 0)])
        is_known = mx.arange(tokens.shape[1])[:, None] < ends
        hidden = mx.where(is_known, hidden, network.mask_hidden.reshape(1, 1, -1))
        head, _ = self._step(tokens, network.features(hidden))
        drafting = [range(len(row) - 1, len(row) + masked) for row in following]
        self._drafted, self._index = self._logits(gathered(head, drafting)), 0
        return self._drafted[:, :1]

    def next_logits(self, tokens: mx.array) -> mx.array:
        self._index += 1
        return self._drafted[:, self._index : self._index + 1]
