"""The base classes of all hidden-state drafters: their kinds, networks, and sequences. A drafter
without an embedding or a head of its own uses the target's."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from ...errors import CheckpointError, first_line
from ...types import FINAL, Context, Reusable, after, rectangle
from ..base import Base
from ..encoder_decoder.context import EncodedSources
from ..encoder_decoder.layers import attend_cached
from ..number_format import NumberFormat, count, evaluate, expand, nbytes, quantize
from ..rows import STEP, KVCache, Rows, RowsContext
from .files import IN_16_BITS, DrafterFiles
from .layers import Source

Config = Mapping[str, Any]
MOST_WAITING = 4096
"""Number of hidden states of a row that may wait for the next draft. With five layers of width
5,120 they take 200 MB in half precision."""
DIVIDE_EVERY = 64
"""Rounds after which waiting hidden states are divided by row."""
MOST_IN_PASS = 512
"""Hidden states per row in one pass over a long backlog."""


class DrafterNetwork(nn.Module, ABC):
    """A kind of hidden-state drafter, and a network of this kind. Parameters are named as in files.

    Attributes:
        described: Whether config.json alone determines the names and shapes of all tensors.
        by_speculators: Whether the package `speculators` writes drafters of this kind.
        missing: The error message if the user asks for this kind and there is no such drafter.
        hidden: Names of the target's hidden states that the network reads, concatenated in this
            order. If the files name no layers, the network reads the inputs of the target's head.
        widths: The width of each of these hidden states.
        normed: Whether a norm follows the layers.
        batched: Whether the rows of a group share passes.
        most: Maximum number of draft tokens in a round.
    """

    described = by_speculators = normed = batched = True
    missing = (
        "there is no such drafter to propose: name the directory of one that was made for this "
        "target with draft-model"
    )
    layers: list[Any]
    most: int = sys.maxsize

    @staticmethod
    @abstractmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        """Return whether a directory holds a drafter of this kind, from config.json and the names
        of the tensors."""

    @staticmethod
    @abstractmethod
    def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
        """Open a directory, from the name of the kind, the directory, config.json and the weights
        (None without weights). Raises CheckpointError."""

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__()
        self.kind = files.kind
        self.sizes = files.sizes
        present, width = files.tensors, files.sizes.width
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
        self.input_dtype = target.state_dtype
        self.hidden = tuple(after(layer) for layer in files.hidden_layers_of(target.layers)) or (
            FINAL,
        )
        self.widths = (target.width,) * len(self.hidden)
        # For each token of the target, its index in the drafter's logits, (vocabulary,) int32. A
        # token that the drafter lacks has the index after the last logit. None if both
        # vocabularies are the same.
        self._places: Any = None
        if (ids := files.target_ids) is not None:
            self._places = mx.full((target.vocabulary,), len(ids), dtype=mx.int32)
            self._places[mx.array(ids)] = mx.arange(len(ids), dtype=mx.int32)

    @property
    def stops(self) -> bool:
        """Whether the network estimates how likely its draft tokens are to be accepted."""
        return "confidence_head" in self

    @property
    def nbytes(self) -> int:
        return nbytes(self)

    @property
    def dtype(self) -> mx.Dtype:
        # A matrix may be quantized, a norm never is.
        return (self.norm if self.normed else self.fc).weight.dtype

    @property
    def inputs(self) -> int:
        """The width of all hidden states of one position, concatenated."""
        return sum(self.widths)

    def cache_nbytes(self, source: int, positions: int) -> int:
        """Return the bytes that the drafter's cache takes for one row: keys and values, and the
        target's hidden states that the drafter has not read yet. See
        `models.base.Base.cache_nbytes` for the arguments."""
        of_source, of_position = self._row_nbytes
        waiting = min(positions, MOST_WAITING) * self.inputs * self.input_dtype.size
        return source * of_source + -(-positions // STEP) * STEP * of_position + waiting

    @cached_property
    def _row_nbytes(self) -> tuple[int, int]:
        context = self.open()
        if "encoder_norm" in self:
            context.attend([mx.zeros((1, 1, self.encoder_norm.weight.shape[0]))])
        context.add(mx.zeros((1, 1, self.inputs), dtype=self.dtype), [1])
        context.feed([[0]])
        encoded = [array for source in context._sources if source for array in source[:2]]
        cached = [array for arrays in context._state() for array in arrays]
        per_token = [sum(a.nbytes // a.shape[2] for a in arrays) for arrays in (encoded, cached)]
        return per_token[0], per_token[1]

    def open(self, count: int = 1) -> DrafterContext:
        """Return a context of `count` new rows."""
        return ChainContext(self, count)

    def caches(self, rows: Rows) -> list[Any]:
        """Return new caches of these rows, as the layers get them."""
        return [KVCache(rows) for _ in self.layers]

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

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings, (batch, m, width), of the target's tokens, (batch, m) int32."""
        embed = self.embed_tokens if "embed_tokens" in self else self._target.embed
        rows: mx.array = embed(tokens)
        return rows.astype(self.dtype)

    def features(self, hidden: mx.array) -> mx.array:
        """Return the drafter's inputs, (batch, m, width), in its dtype. `hidden`, (batch, m, number
        of hidden states x target's width), has the target's hidden states side by side."""
        return hidden.astype(self.dtype)

    def project_encoded(self, encoded: mx.array) -> list[mx.array]:
        """Return each layer's keys and values of the encoder's output, (batch, n, encoder's width),
        alternately; [] if no layer attends to the encoder."""
        if "encoder_norm" not in self:
            return []
        states = self.encoder_norm(encoded.astype(self.dtype))
        pairs = (layer.encoder_attn.keys_values(states) for layer in self.layers)
        # Copied once into contiguous arrays: every later pass would copy a transposed view.
        return [mx.contiguous(array) for pair in pairs for array in pair]

    def own_logits(self, states: mx.array) -> mx.array:
        """Return logits, (batch, m, the drafter's vocabulary), of the head's inputs, (batch, m,
        width)."""
        if "lm_head" in self:
            return self.lm_head(states)
        return self._target.head(states.astype(self._target.state_dtype))

    def over_target(self, logits: mx.array) -> mx.array:
        """Return logits over the target's vocabulary, -inf for tokens that the drafter lacks."""
        if self._places is None:
            return logits
        nothing = mx.full((*logits.shape[:-1], 1), -mx.inf, dtype=logits.dtype)
        return mx.concatenate([logits, nothing], axis=-1)[..., self._places]


class DrafterContext(RowsContext, ABC):
    """The rows of a group in a drafter. Keys and values of the target's hidden states stay in the
    caches. The proposer drops keys and values of draft tokens with `rewind`.

    Hidden states wait until the tokens after them are known and a draft needs them. Each pass
    processes all rows: shorter rows are padded, and the padding is rewound.

    Attributes:
        waiting: The number of hidden states that wait, for each row.
    """

    def __init__(self, network: DrafterNetwork, count: int) -> None:
        rows = Rows(count)
        self._network, self._entries = network, network.caches(rows)
        super().__init__(rows, self._entries)
        self.waiting = rows.lengths
        # Older waiting states are kept by row, and the newest ones by round.
        self._own: list[list[mx.array]] = [[] for _ in range(count)]
        self._parts: list[tuple[mx.array, Sequence[int]]] = []
        self._encoded: EncodedSources | None = None

    @property
    def _sources(self) -> list[Source]:
        encoded = self._encoded
        if encoded is None or not encoded.projected:
            return [None] * len(self._entries)
        return [(keys, values, encoded.mask) for keys, values in encoded.by_layer]

    def attend(self, encoded: Sequence[mx.array]) -> None:
        """Set the output of the target's encoder for each row, (1, n, width). Call this first."""
        project = self._network.project_encoded
        parts = [EncodedSources((states,), project(states)) for states in encoded]
        self._encoded = reduce(EncodedSources.merge, parts)

    def add(self, hidden: mx.array, counts: Sequence[int]) -> None:
        """Let the target's hidden states of committed tokens wait.

        Args:
            hidden: All hidden states, concatenated, (batch, m, number of hidden states x width).
            counts: The number of the m positions that belong to each row.
        """
        self._parts.append((hidden[:, : max(counts)], counts))
        self.waiting = tuple(map(add, self.waiting, counts))
        if len(self._parts) == DIVIDE_EVERY:
            self._divide()

    def feed(self, following: Sequence[Sequence[int]]) -> None:
        """Process waiting hidden states, in chunks, without computing the last chunk yet.

        Args:
            following: The token after each of a row's hidden states that are to be processed, for
                each row. The states that wait longest are processed.
        """
        counts, waiting = list(map(len, following)), self.waiting
        if not any(counts):
            return
        hidden = self._taken()
        for start in range(0, max(counts), MOST_IN_PASS):
            if start:
                mx.eval(self._state())
            part = [tokens[start : start + MOST_IN_PASS] for tokens in following]
            self._process(hidden[:, start : start + max(map(len, part))], part)
        left = [range(begin, end) for begin, end in zip(counts, waiting, strict=True)]
        if any(left):
            # A copy, so that the memory of the earlier states can be released.
            self.add(gathered(hidden, left) + 0, [len(places) for places in left])

    def first_logits(self, following: Sequence[Sequence[int]], count: int) -> mx.array:
        """Begin a draft of `count` tokens, and return the logits of the first, (batch, 1, the
        target's vocabulary). `following` has a token after each waiting hidden state of each row.
        """
        if max(map(len, following)) > MOST_IN_PASS:
            fed = [(len(tokens) - 1) // MOST_IN_PASS * MOST_IN_PASS for tokens in following]
            self.feed([tokens[:n] for tokens, n in zip(following, fed, strict=True)])
            following = [tokens[n:] for tokens, n in zip(following, fed, strict=True)]
        return self._begin(self._taken(), following, count)

    @abstractmethod
    def next_logits(self, tokens: mx.array) -> mx.array:
        """Return the logits of the tokens after the draft tokens `tokens`, (batch, 1) int32."""

    @abstractmethod
    def _process(self, hidden: mx.array, following: Sequence[Sequence[int]]) -> Any:
        """Process hidden states, (batch, m, all widths). Row i has as many as tokens follow."""

    @abstractmethod
    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        """Process hidden states like `_process`, and return the result of `first_logits`."""

    def chances(self) -> mx.array | None:
        """Return, for each draft position so far, the probability that its token is accepted if all
        tokens before it are, (batch, count) float32. It does not depend on the token that was
        drawn. Return None if the network has no such estimate."""
        return None

    def evaluate(self) -> None:
        """Compute the keys and values of all hidden states that were processed, and the others, and
        wait for them."""
        mx.eval(self._state(), self._own, [hidden for hidden, _ in self._parts])

    def merge(self, joining: Context) -> None:
        assert isinstance(joining, DrafterContext)
        self._divide()
        joining._divide()
        super().merge(joining)
        self.waiting, self._own = self.waiting + joining.waiting, self._own + joining._own
        if self._encoded is not None and joining._encoded is not None:
            self._encoded = self._encoded.merge(joining._encoded)

    def keep(self, rows: Sequence[int]) -> None:
        self._divide()
        super().keep(rows)
        self.waiting = tuple(self.waiting[row] for row in rows)
        self._own = [self._own[row] for row in rows]
        if self._encoded is not None:
            self._encoded = self._encoded.keep(rows)

    def snapshot(self, sequence: int) -> Reusable:
        """See `Context`. Each position depends on a hidden state and on the token after it. If the
        target has an encoder, nothing is reusable, since another prompt has another source."""
        if self._encoded is not None:
            return Reusable()
        return replace(super().snapshot(sequence), lag=1)

    def _divide(self) -> None:
        """Copy the newest waiting states of each row. Rows can then join and leave without a copy,
        and a row that leaves frees its states."""
        for row, own in enumerate(self._own):
            new = [hidden[row : row + 1, : n[row]] for hidden, n in self._parts if n[row]]
            if new:
                own.append(mx.concatenate(new, axis=1) if len(new) > 1 else new[0] + 0)
        mx.async_eval([own[-1:] for own in self._own])
        self._parts = []

    def _taken(self) -> mx.array:
        """Return all hidden states that have waited, (batch, longest, all widths)."""
        if any(self._own) or len(self._parts) != 1:
            self._divide()
            nothing = mx.zeros((1, 0, self._network.inputs), dtype=self._network.input_dtype)
            rows = [mx.concatenate(own, axis=1) if own else nothing for own in self._own]
            ends = [max(self.waiting) - states.shape[1] for states in rows]
            padded = [mx.pad(s, [(0, 0), (0, n), (0, 0)]) for s, n in zip(rows, ends, strict=True)]
            self._parts = [(mx.concatenate(padded), self.waiting)]
        [(states, counts)] = self._parts
        self._parts, self._own = [], [[] for _ in counts]
        self.waiting = (0,) * len(counts)
        return states

    def _advance(self, following: Sequence[Sequence[int]], drafted: Sequence[int] = ()) -> mx.array:
        """Begin a pass over these tokens of each row and the tokens `drafted` after them. The
        latter are rewound at once. Return all tokens, (batch, m) int32."""
        tokens = rectangle([[*row, *drafted] for row in following])
        counts, starts = list(map(len, following)), self.lengths
        self._rows.advance(tokens, tokens.shape[1] - min(counts))
        self._rows.rewind(tuple(map(add, starts, counts)))
        return tokens

    def _state(self) -> list[list[mx.array]]:
        return [cache.state for cache in self._caches]


def gathered(states: mx.array, places: Sequence[range]) -> mx.array:
    """Return the rows of states, (batch, m, width), at each sequence's places, (batch, longest,
    width). Shorter sequences are padded."""
    if len(set(places)) == 1:
        return states[:, places[0].start : places[0].stop]
    return mx.take_along_axis(states, rectangle(places)[..., None], axis=1)


class ChainContext(DrafterContext):
    """The rows of a group in a network that drafts one token per step, with one cached position per
    hidden state of the target. In the next step, the network's own output takes the place of the
    hidden state. The network defines two methods:

    - `first(tokens, states)` returns the residual and the inputs of the first layer's attention.
    - `ends(states)` turns the last layer's output into the inputs of the head and of the next step.
    """

    def _process(
        self, hidden: mx.array, following: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array]:
        return self._step(self._advance(following), self._network.features(hidden))

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        newest = [range(len(tokens) - 1, len(tokens)) for tokens in following]
        head, states = self._process(hidden, following)
        self._fed_back = gathered(states, newest)
        return self._logits(gathered(head, newest))

    def next_logits(self, tokens: mx.array) -> mx.array:
        self._rows.advance(tokens, 1)
        head, self._fed_back = self._step(tokens, self._fed_back)
        return self._logits(head)

    def _step(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """Run all layers over tokens, (batch, m), and the states of the positions before them,
        (batch, m, width). Return the inputs of the head and of the next step."""
        network, place = self._network, self._rows.place
        mask, offset = place.causal_mask(), place.offset
        residual, rows = network.first(tokens, states)
        parts = zip(network.layers, self._caches, self._sources, strict=True)
        for number, (layer, cache, source) in enumerate(parts):
            if number:
                residual, rows = states, layer.input_layernorm(states)
            attended = attend_cached(cache, mask, layer.self_attn, rows, offset)
            states = layer.finish(residual, attended, source)
        return network.ends(states)

    def _logits(self, head: mx.array) -> mx.array:
        return self._network.over_target(self._network.own_logits(head))
