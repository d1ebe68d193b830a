"""What all kinds of hidden-state drafters share: what a kind is, its network, and its sequences. A
target lends its embedding and its head to drafters that have none of their own."""

from __future__ import annotations

import sys
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
from ...interfaces import FINAL, after
from ..base import Base
from ..kv_cache import STEP, KVCache
from ..number_format import NumberFormat, count, evaluate, expand, quantize
from ..rows import Rows, RowsContext
from .files import IN_16_BITS, DrafterFiles
from .layers import Attention, Layer, Source

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of hidden-state drafter: what its files mean, and its network.

    name: as in the table of kinds. recognizes: returns whether a directory holds one, from its
    config.json and the names of its tensors. read: opens a directory, from its config.json and its
    weights, None where it has none; raises CheckpointError. network: from what `read` returned.
    described: config.json tells what tensors there are. layer_ids: the entry of config.json that
    names the target's layers by their inputs. by_speculators: the package `speculators` writes it.
    missing: the sentence for a pair that brings none."""

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


class DrafterNetwork(nn.Module):
    """A network that drafts from hidden states of a target. Parameters are named as in files. taps:
    the hidden states that it reads, side by side; without layers to read, those that the target's
    head is given. normed: it has a norm behind its layers. most: tokens that a round may draft."""

    layers: list[Layer]
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
        """Read the hidden states of a target, which lends its embedding and its head where the
        drafter has none of its own. Raises CheckpointError."""
        self._target = target
        self.taps = tuple(after(layer) for layer in files.tapped_of(target.layers)) or (FINAL,)
        # Where the drafter's logits have each of the target's tokens, (vocabulary,) int32, behind
        # the last one for those that it lacks; None where both vocabularies are one.
        self._places: Any = None
        if (ids := self.target_ids) is not None:
            self._places = mx.full((target.vocabulary,), len(ids), dtype=mx.int32)
            self._places[mx.array(ids)] = mx.arange(len(ids), dtype=mx.int32)

    @property
    def stops(self) -> bool:
        """Whether it estimates how likely its drafts are to be accepted."""
        return "confidence_head" in self

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    @property
    def dtype(self) -> mx.Dtype:
        # A matrix may be stored in fewer bits.
        return (self.norm if self.normed else self.fc).weight.dtype

    def cache_nbytes(self, source: int, columns: int) -> int:
        """Return the bytes of a sequence's keys and values; see models.base.Base."""
        of_source, of_column = self._row_nbytes
        return source * of_source + -(-columns // STEP) * STEP * of_column

    @cached_property
    def _row_nbytes(self) -> tuple[int, int]:
        reading = self.open()
        if "encoder_norm" in self:
            reading.attend(mx.zeros((1, 1, self.encoder_norm.weight.shape[0])))
        width = sum(map(self.width_of, self.taps))
        reading.read(mx.zeros((1, 1, width), dtype=self.dtype), mx.zeros((1, 1), dtype=mx.int32))
        given = [each for source in reading._sources if source is not None for each in source[:2]]
        cached = [each for cache in reading._caches for each in cache.state]
        per_token = [sum(a.nbytes // a.shape[2] for a in arrays) for arrays in (given, cached)]
        return per_token[0], per_token[1]

    def open(self) -> Reading:
        """Begin a sequence of which nothing was read."""
        raise NotImplementedError

    def load(self, files: DrafterFiles, numbers: NumberFormat) -> None:
        """Load the weights of a directory. Raises OptionError."""
        self.take(files, numbers, values=True)
        evaluate(self)

    def take(self, files: DrafterFiles, numbers: NumberFormat, *, values: bool) -> None:
        """Bring the weights, with `values` those of the directory, into these numbers, lazily."""
        stored = files.tensors
        numbers.check_plain(files.directory, stored.quantized)
        how = {path: each.as_dict() for path, each in stored.quantized.items()}
        nn.quantize(self, class_predicate=lambda path, module: how.get(path, False))
        if values:
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

    def width_of(self, tap: str) -> int:
        return self._target.width

    def embed(self, tokens: mx.array) -> mx.array:
        """(1, m) int32 of the target's -> (1, m, width)."""
        lent = "embed_tokens" not in self
        rows: mx.array = self._target.embed(tokens) if lent else self.embed_tokens(tokens)
        return rows.astype(self.dtype)

    def sources(self, encoded: mx.array, mask: mx.array | None = None) -> list[Source | None]:
        """Return what each layer attends to of (batch, n, encoder's width), None where layers do
        not. mask: (batch, n) bool, False for padding."""
        if "encoder_norm" not in self:
            return [None] * len(self.layers)
        states = self.encoder_norm(encoded.astype(self.dtype))
        hidden = None if mask is None else mask[:, None, None]
        given = (layer.encoder_attn.keys_values(states) for layer in self.layers)
        # Laid out once in this order: every later pass would copy a transposed view.
        return [
            Source(mx.contiguous(keys), mx.contiguous(values), hidden) for keys, values in given
        ]

    def own_logits(self, states: mx.array) -> mx.array:
        """(1, m, width), the head's inputs -> logits (1, m, the drafter's vocabulary)."""
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


class Reading(RowsContext):
    """One sequence in a network. Keys and values that were made of the target's hidden states stay,
    those that were made while guessing are dropped. layers: the number of caches. cache: makes that
    of one layer."""

    _network: DrafterNetwork

    def __init__(self, layers: int, cache: Callable[[Rows], Any] = KVCache) -> None:
        rows = Rows(1)
        super().__init__(rows, [cache(rows) for _ in range(layers)])
        self._sources: list[Source | None] = [None] * layers

    @property
    def length(self) -> int:
        """The number of rows of the target that were read."""
        return self._rows.lengths[0]

    def attend(self, encoded: mx.array) -> None:
        """Attend to the output of the target's encoder, (1, n, width), before anything is read."""
        if "encoder_norm" in self._network:
            self._sources = self._network.sources(encoded)

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """Read the target's hidden states side by side, (1, m, taps x width), of committed tokens,
        and for each of them the committed token after it, (1, m) int32. Lazy."""
        raise NotImplementedError

    def guess(self, count: int) -> mx.array:
        """Begin `count` tokens behind the newest one that was read, and return the logits (1, 1,
        the target's vocabulary) of the first."""
        raise NotImplementedError

    def guess_after(self, token: mx.array) -> mx.array:
        """Return the logits of the next token, behind the guessed `token`, (1, 1) int32."""
        raise NotImplementedError

    def chances(self) -> mx.array | None:
        """Return how likely each of the tokens guessed so far is to be accepted if all before it
        are, (1, count) float32, whichever was drawn; None where the network does not tell."""
        return None

    def evaluate(self) -> None:
        """Compute what was read so far, and wait for it."""
        mx.eval([cache.state for cache in self._caches])


Sources = Sequence[Source | None]
"""Of `DrafterNetwork.sources`."""
Attend = Callable[[int, Attention, mx.array], mx.array]
"""The number of a layer, its attention and the inputs of that, (1, m, inputs) -> its output."""


class Chain(DrafterNetwork):
    """A network whose own output takes the place of the target's hidden state in its next step. A
    kind has `first`, which returns the residual and the inputs of the first layer's attention, from
    tokens and the states before them; and `ends`, which returns the inputs of the head and of the
    next step, from the output of the last layer."""

    def open(self) -> Reading:
        return ChainReading(self, len(self.layers))

    def features(self, hidden: mx.array) -> mx.array:
        """(1, m, taps x width), the target's states -> inputs of the first step, (1, m, width)."""
        return hidden.astype(self.dtype)

    def through(
        self, tokens: mx.array, states: mx.array, sources: Sources, attend: Attend
    ) -> mx.array:
        """Run all layers over (batch, m) tokens and the states before them, (batch, m, width)."""
        residual, rows = self.first(tokens, states)
        for number, layer in enumerate(self.layers):
            if number:
                residual, rows = states, layer.input_layernorm(states)
            attended = attend(number, layer.self_attn, rows)
            states = layer.finish(residual, attended, sources[number])
        return states

    def step(
        self, tokens: mx.array, states: mx.array, caches: list[Any], offset: int, sources: Sources
    ) -> tuple[mx.array, mx.array]:
        """Run (1, m) tokens and the states before them, the first at `offset`; return the inputs of
        the head and of the next step. sources: see `DrafterNetwork.sources`."""
        mask = "causal" if tokens.shape[1] > 1 else None

        def attend(number: int, attention: Attention, rows: mx.array) -> mx.array:
            return attention.step(rows, caches[number], offset, mask)

        return self.ends(self.through(tokens, states, sources, attend))


class ChainReading(Reading):
    """One sequence: a row for each token that the target has seen, with the one after it."""

    _newest: tuple[mx.array, mx.array]
    _guessed: mx.array

    def __init__(self, network: Chain, layers: int, cache: Callable[[Rows], Any] = KVCache) -> None:
        super().__init__(layers, cache)
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
