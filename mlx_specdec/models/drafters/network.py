"""The base classes of all hidden-state drafters: their kinds, networks, and sequences. A drafter
without an embedding or a head of its own uses the target's."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints.files import Weights
from ...errors import CheckpointError, first_line
from ...types import FINAL, after
from ..base import Base
from ..encoder_decoder.layers import Attention, attend_cached
from ..kv_cache import STEP, KVCache
from ..number_format import NumberFormat, count, evaluate, expand, quantize
from ..rows import Rows, RowsContext
from .files import IN_16_BITS, DrafterFiles
from .layers import DrafterLayer, SourceKeysValues

Config = Mapping[str, Any]


@dataclass(frozen=True)
class DrafterKind:
    """One kind of hidden-state drafter: how its files are read, and its network.

    Attributes:
        recognizes: Returns whether a directory holds a drafter of this kind, from config.json and
            the names of the tensors.
        read: Opens a directory, from config.json and the weights (None without weights). Raises
            CheckpointError.
        network: Builds the network of the files that `read` returned.
        described: Whether config.json alone determines the names and shapes of all tensors.
        layer_ids: The entry of config.json that lists the target's layers whose inputs are read.
        by_speculators: Whether the package `speculators` writes drafters of this kind.
        missing: The error message if the user asks for this kind and there is no such drafter.
    """

    name: str
    recognizes: Callable[[Config, Collection[str]], bool]
    read: Callable[[Path, Config, Weights | None], DrafterFiles]
    network: Callable[[Any], DrafterNetwork]
    described: bool = True
    layer_ids: str = ""
    by_speculators: bool = True
    missing: str = (
        "there is no such drafter to propose: name the directory of one that was made for this "
        "target with draft-model"
    )


class DrafterNetwork(nn.Module, ABC):
    """A network that drafts from hidden states of a target. Parameters are named as in files.

    Attributes:
        hidden: Names of the target's hidden states that the network reads, concatenated in this
            order. If the files name no layers, the network reads the inputs of the target's head.
        normed: Whether a norm follows the layers.
        most: Maximum number of draft tokens in a round.
    """

    layers: list[DrafterLayer]
    normed = True
    most: int = sys.maxsize

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__()
        self.kind = files.kind
        self.sizes = files.sizes
        present, width = files.tensors, files.sizes.width
        self.target_ids = files.target_ids
        self.fc = nn.Linear(files.inputs, width, bias="fc.bias" in present)
        if self.normed:
            self.norm = nn.RMSNorm(width, files.sizes.eps)
        if "embed_tokens.weight" in present:
            self.embed_tokens = nn.Embedding(files.vocabulary, width)
        if "lm_head.weight" in present or files.drafted != files.vocabulary:
            self.lm_head = nn.Linear(width, files.drafted, bias=False)
        if files.sizes.encoder_width is not None:
            self.encoder_norm = nn.RMSNorm(files.sizes.encoder_width, files.sizes.eps)

    def bind(self, files: DrafterFiles, target: Base) -> None:
        """Choose the target's hidden states to read, and use its embedding and its head if the
        drafter has none of its own. Raises CheckpointError."""
        self._target = target
        self.hidden = tuple(after(layer) for layer in files.hidden_layers_of(target.layers)) or (
            FINAL,
        )
        # For each token of the target, its index in the drafter's logits, (vocabulary,) int32. A
        # token that the drafter lacks has the index after the last logit. None if both
        # vocabularies are the same.
        self._places: Any = None
        if (ids := self.target_ids) is not None:
            self._places = mx.full((target.vocabulary,), len(ids), dtype=mx.int32)
            self._places[mx.array(ids)] = mx.arange(len(ids), dtype=mx.int32)

    @property
    def stops(self) -> bool:
        """Whether the network estimates how likely its draft tokens are to be accepted."""
        return "confidence_head" in self

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    @property
    def dtype(self) -> mx.Dtype:
        # A matrix may be quantized, a norm never is.
        return (self.norm if self.normed else self.fc).weight.dtype

    def cache_nbytes(self, source: int, positions: int) -> int:
        """Return the bytes of a sequence's keys and values; see `models.base.Base`."""
        of_source, of_position = self._row_nbytes
        return source * of_source + -(-positions // STEP) * STEP * of_position

    @cached_property
    def _row_nbytes(self) -> tuple[int, int]:
        reading = self.open()
        if "encoder_norm" in self:
            reading.attend(mx.zeros((1, 1, self.encoder_norm.weight.shape[0])))
        width = sum(map(self.width_of, self.hidden))
        reading.read(mx.zeros((1, 1, width), dtype=self.dtype), mx.zeros((1, 1), dtype=mx.int32))
        encoded = [array for source in reading._sources if source for array in source[:2]]
        cached = [array for cache in reading._caches for array in cache.state]
        per_token = [sum(a.nbytes // a.shape[2] for a in arrays) for arrays in (encoded, cached)]
        return per_token[0], per_token[1]

    @abstractmethod
    def open(self) -> Reading:
        """Return a new sequence, which has read nothing yet."""

    def load(self, files: DrafterFiles, numbers: NumberFormat) -> None:
        """Load the weights of a directory, quantized and cast as `numbers` says. Raises
        CheckpointError and OptionError."""
        stored = files.tensors
        numbers.check_plain(files.directory, stored.quantized)
        how = {path: quantization.as_dict() for path, quantization in stored.quantized.items()}
        nn.quantize(self, class_predicate=lambda path, module: how.get(path, False))
        try:
            self.load_weights(list(stored.items()))
        except ValueError as problem:  # parts of a quantized matrix do not fit one another
            raise CheckpointError(f"{files.directory}: {first_line(problem):.200}") from problem
        self.set_dtype(numbers.floating(stored["fc.weight"].dtype))
        if how and numbers.expands(count(self)):
            expand(self)
        if numbers.q_bits is not None:
            quantize(
                self, numbers.q_bits, numbers.q_group_size, lambda path, _: path not in IN_16_BITS
            )
        evaluate(self)

    def width_of(self, name: str) -> int:
        return self._target.width

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings, (1, m, width), of the target's tokens, (1, m) int32."""
        embed = self.embed_tokens if "embed_tokens" in self else self._target.embed
        rows: mx.array = embed(tokens)
        return rows.astype(self.dtype)

    def sources(
        self, encoded: mx.array, mask: mx.array | None = None
    ) -> list[SourceKeysValues | None]:
        """Return each layer's keys and values of the encoder's output, (batch, n, encoder's width),
        or None for layers without an attention to the encoder. `mask`, (batch, n) bool, is False
        for padding."""
        if "encoder_norm" not in self:
            return [None] * len(self.layers)
        states = self.encoder_norm(encoded.astype(self.dtype))
        hidden = None if mask is None else mask[:, None, None]
        pairs = (layer.encoder_attn.keys_values(states) for layer in self.layers)
        # Copied once into contiguous arrays: every later pass would copy a transposed view.
        return [
            SourceKeysValues(mx.contiguous(keys), mx.contiguous(values), hidden)
            for keys, values in pairs
        ]

    def own_logits(self, states: mx.array) -> mx.array:
        """Return logits, (1, m, the drafter's vocabulary), of the head's inputs, (1, m, width)."""
        if "lm_head" in self:
            logits: mx.array = self.lm_head(states)
            return logits
        return self._target.head(states.astype(self._target.state_dtype))

    def over_target(self, logits: mx.array) -> mx.array:
        """Return logits over the target's vocabulary, -inf for tokens that the drafter lacks."""
        if self._places is None:
            return logits
        nothing = mx.full((*logits.shape[:-1], 1), -mx.inf, dtype=logits.dtype)
        return mx.concatenate([logits, nothing], axis=-1)[..., self._places]


class Reading(RowsContext, ABC):
    """One sequence's state in a drafter. Keys and values of the target's hidden states stay in the
    caches. The proposer drops keys and values of draft tokens with `rewind`."""

    _network: DrafterNetwork

    def __init__(self, layers: int) -> None:
        rows = Rows(1)
        super().__init__(rows, [KVCache(rows) for _ in range(layers)])
        self._sources: list[SourceKeysValues | None] = [None] * layers

    @property
    def length(self) -> int:
        """The number of the target's hidden states that were read."""
        return self._rows.lengths[0]

    def attend(self, encoded: mx.array) -> None:
        """Set the output of the target's encoder, (1, n, width). Call this before `read`."""
        if "encoder_norm" in self._network:
            self._sources = self._network.sources(encoded)

    @abstractmethod
    def read(self, hidden: mx.array, following: mx.array) -> None:
        """Read the target's hidden states of committed tokens, without computing anything yet.

        Args:
            hidden: All hidden states, concatenated, (1, m, number of hidden states x width).
            following: For each of these positions, the committed token after it, (1, m) int32.
        """

    @abstractmethod
    def guess(self, count: int) -> mx.array:
        """Begin a proposal of `count` tokens after the newest token that was read, and return the
        logits of the first, (1, 1, the target's vocabulary)."""

    @abstractmethod
    def guess_after(self, token: mx.array) -> mx.array:
        """Return the logits of the token after the draft token `token`, (1, 1) int32."""

    def chances(self) -> mx.array | None:
        """Return, for each draft position so far, the probability that its token is accepted if all
        tokens before it are, (1, count) float32. It does not depend on the token that was drawn.
        Return None if the network has no such estimate."""
        return None

    def evaluate(self) -> None:
        """Compute the keys and values of everything that was read, and wait for them."""
        mx.eval([cache.state for cache in self._caches])


Sources = Sequence[SourceKeysValues | None]
"""The result of `DrafterNetwork.sources`."""
Attend = Callable[[int, Attention, mx.array], mx.array]
"""Computes a layer's self-attention. Arguments: the layer's number, its attention, and the inputs,
(1, m, inputs)."""


class Chain(DrafterNetwork):
    """A network that drafts one token per step. In the next step, its own output takes the place of
    the target's hidden state. A subclass defines two methods:

    - `first(tokens, states)` returns the residual and the inputs of the first layer's attention.
    - `ends(states)` turns the last layer's output into the inputs of the head and of the next step.
    """

    def open(self) -> Reading:
        return ChainReading(self, len(self.layers))

    def features(self, hidden: mx.array) -> mx.array:
        """Return the inputs of the first step, (1, m, width), from the target's hidden states,
        (1, m, number of hidden states x width)."""
        return hidden.astype(self.dtype)

    def step(
        self, tokens: mx.array, states: mx.array, caches: list[Any], offset: int, sources: Sources
    ) -> tuple[mx.array, mx.array]:
        """Run all layers over tokens, (batch, m), and the states of the positions before them,
        (batch, m, width). Add keys and values to the layers' caches, and return the inputs of the
        head and of the next step. The first token is at position `offset`. For `sources`, see
        `DrafterNetwork.sources`."""
        mask = "causal" if tokens.shape[1] > 1 else None
        residual, rows = self.first(tokens, states)
        for number, layer in enumerate(self.layers):
            if number:
                residual, rows = states, layer.input_layernorm(states)
            attended = attend_cached(caches[number], mask, layer.self_attn, rows, offset)
            states = layer.finish(residual, attended, sources[number])
        return self.ends(states)


class ChainReading(Reading):
    """One sequence's state in a `Chain`: one cached position per hidden state of the target."""

    _newest: tuple[mx.array, mx.array]
    _guessed: mx.array

    def __init__(self, network: Chain, layers: int) -> None:
        super().__init__(layers)
        self._network = network

    def read(self, hidden: mx.array, following: mx.array) -> None:
        head, fed_back = self._step(following, self._network.features(hidden), 0)
        self._newest = head[:, -1:], fed_back[:, -1:]

    def guess(self, count: int) -> mx.array:
        head, self._guessed = self._newest
        return self._logits(head)

    def guess_after(self, token: mx.array) -> mx.array:
        head, self._guessed = self._step(token, self._guessed, 1)
        return self._logits(head)

    def _step(self, tokens: mx.array, states: mx.array, proposed: int) -> tuple[mx.array, mx.array]:
        place = self._rows.advance(tokens, proposed)
        return self._network.step(tokens, states, self._caches, place.starts[0], self._sources)

    def _logits(self, head: mx.array) -> mx.array:
        return self._network.over_target(self._network.own_logits(head))
