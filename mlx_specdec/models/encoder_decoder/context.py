"""Contexts of encoder-decoder models, and the interface of the families' networks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...system import show_size
from ...text.tokenizer import Kind
from ...types import FINAL, Cached, Context, Reusable, Scores, rectangle
from ..base import check_prompt, family_of, layer_of
from ..cpu_layers import begin, lighten
from ..exact import ExactPasses, exact_pass, rows_stand_alone, try_exact
from ..number_format import nbytes
from ..rows import STEP, KVCache, Place, Rows, RowsContext, padded
from .layers import SOURCE_ROWS, Attention, KeysValues

ENCODER = re.compile(r"(model\.)?(encoder|shared)\.")
"""Beginning of the names of an encoder's tensors."""
Caches = Sequence[KVCache]
"""The cache of each decoder layer."""
Tables = Sequence[mx.array]
"""The result of `Network.tables`."""


class Network(nn.Module, ABC):
    """The modules of an encoder-decoder model, named as in Hugging Face checkpoints.

    Attributes:
        model_type: The family's name in `loading.ENCODER_DECODERS`.
        source_vocabulary: Size of the encoder's vocabulary if it has one of its own.
        width: Width of the encoder's output and of hidden states.
        start: The tokens that every decoder sequence begins with, at least one.
        max_length: Maximum length of a source and of a decoder sequence; None without a limit.
        trained_length: Tokens of the longest sources in training.
        heads, inner: Number of heads, and inner feed-forward width, of an encoder layer.
        row: Number of entries in the keys and values of one position, in all decoder layers.
        merged: Whether one softmax covers the source and the decoder sequence. The caches then
            begin with the positions of the source.
        note: A line for the user about tensors that were left out or cast to another dtype.
    """

    model_type: str
    vocabulary: int
    source_vocabulary: int | None = None
    width: int
    start: tuple[int, ...]
    max_length: int | None = None
    trained_length: int
    heads: int
    inner: int
    row: int
    merged = False
    note: str = ""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers."""
        return list(self.model.decoder.layers)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of hidden states. It is the dtype of norms, which are never quantized."""
        parts = tree_flatten(self.layers[0].parameters())
        return next(array.dtype for name, array in parts if "norm" in name)

    def check_source(self, prompt: Sequence[int]) -> None:
        """Raise PromptError for a source that the model cannot read."""

    @abstractmethod
    def embed(self, tokens: mx.array) -> mx.array:
        """Return the inputs of the decoder's first layer, (batch, m) int32 -> (batch, m, width)."""

    @abstractmethod
    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        """Run the encoder: (batch, n) int32 -> (batch, n, width). `mask`, (batch, 1, 1, n) bool, is
        False for padding."""

    @abstractmethod
    def source_attention(self, layer: nn.Module) -> Attention:
        """Return the attention of a decoder's layer to the encoder's output."""

    def project_encoded(self, encoded: mx.array) -> list[mx.array]:
        """Return the keys and values of the encoder's output in each decoder layer, alternately."""
        pairs = (self.source_attention(layer).keys_values(encoded, None) for layer in self.layers)
        # Copied once into contiguous arrays: every later pass would copy a transposed view.
        return [mx.contiguous(array) for pair in pairs for array in pair]

    def tables(self, reach: int) -> list[mx.array]:
        """Return tables for the first `reach` positions, which are computed once; mostly none."""
        return []

    @abstractmethod
    def decode(
        self, tokens: mx.array, caches: Caches, source: EncodedSources, place: Place, tables: Tables
    ) -> Iterator[mx.array]:
        """Yield the output of each layer, and then the input of the head, (batch, m, width) each.
        The tokens, (batch, m) int32, write the cache positions `place`."""

    @abstractmethod
    def head(self, states: mx.array) -> mx.array:
        """Return logits, (batch, m, vocabulary), from hidden states, (batch, m, width)."""

    def teach(self, sources: mx.array, mask: mx.array, tokens: mx.array) -> mx.array:
        """Return the inputs of the head, (batch, m, width), for complete sequences, (batch, m)
        int32, without caches. `encode` describes `sources` and `mask`."""

        def append(before: KeysValues, *new: mx.array) -> KeysValues:
            # If one softmax covers both, the keys and values of the source come first.
            pairs = zip(before, new, strict=True)
            return [mx.concatenate([*pair], axis=2) for pair in pairs] if before else new

        batch, rows = tokens.shape
        encoded, starts = self.encode(sources, mask), (0,) * batch
        by_layer = EncodedSources((encoded,), self.project_encoded(encoded)).by_layer
        source: Any = SimpleNamespace(by_layer=by_layer, mask=mask, lengths=starts)
        before = [pair if self.merged else () for pair in by_layer]
        caches: Any = [SimpleNamespace(append=partial(append, b)) for b in before]
        *_, states = self.decode(tokens, caches, source, Place(starts, rows), self.tables(rows))
        return states

    def source_nbytes(self, length: int) -> int:
        """Estimate the bytes that `encode` and `project_encoded` take for a source."""
        scores = 5 * self.heads * min(length, SOURCE_ROWS)
        states = 6 * self.width + 3 * self.inner + (1 + self.merged) * self.row
        return length * (scores + states) * self.dtype.size

    def cache_nbytes(self, source: int, positions: int) -> int:
        """Return the bytes of the encoder's output and of all keys and values. Caches grow in steps
        of STEP positions."""
        outside = 0 if self.merged else source
        positions = outside + -(-(source - outside + positions) // STEP) * STEP
        return self.dtype.size * (source * self.width + positions * self.row)


@dataclass(frozen=True)
class EncodedSources:
    """The encoded sources of a batch.

    Attributes:
        encoded: The encoder's output for each source, (1, n, d_model) without padding.
        projected: The keys and values of `encoded` in each decoder layer, alternately; empty if
            they are in the caches.
    """

    encoded: tuple[mx.array, ...]
    projected: Sequence[mx.array] = ()

    @property
    def by_layer(self) -> list[KeysValues]:
        return list(zip(self.projected[::2], self.projected[1::2], strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(states.shape[1] for states in self.encoded)

    @cached_property
    def mask(self) -> mx.array | None:
        return padding_mask(self.lengths)

    def arrays(self, row: int) -> tuple[mx.array, ...]:
        rows, length = slice(row, row + 1), self.lengths[row]
        return (self.encoded[row], *(array[rows, :, :length] for array in self.projected))

    def merge(self, joining: EncodedSources) -> EncodedSources:
        longest = max(self.lengths + joining.lengths)
        both = zip(self.projected, joining.projected, strict=True)
        joined = [mx.concatenate([padded(array, longest) for array in pair]) for pair in both]
        return EncodedSources(self.encoded + joining.encoded, joined)

    def keep(self, rows: Sequence[int]) -> EncodedSources:
        encoded = tuple(self.encoded[row] for row in rows)
        index, longest = mx.array(list(rows), dtype=mx.int32), max(e.shape[1] for e in encoded)
        return EncodedSources(encoded, [array[index, :, :longest] for array in self.projected])


def padding_mask(lengths: Sequence[int]) -> mx.array | None:
    """Return (batch, 1, 1, longest) bool, False for padding; None without padding."""
    if min(lengths) == max(lengths):
        return None
    return mx.arange(max(lengths)) < mx.array(list(lengths))[:, None, None, None]


class EncoderDecoderModel:
    """A `base.Base` over a `Network`. Prompts are the sources of the encoder."""

    kind: Kind = "encoder-decoder"
    # A row's mask does not depend on how many rows a pass has.
    rows_agree = True
    # The encoder itself divides the rows of a prompt.
    holds_scores = False
    lost = False
    why_not_batched = ""
    _shares = False

    def __init__(self, network: Network, identity: str | None = None) -> None:
        lighten(network)
        self.network = network
        self.family, self.identity = family_of(network), identity
        self.vocabulary, self.width = network.vocabulary, network.width
        self.state_dtype = network.dtype
        self.nbytes = nbytes(network)
        self.max_length, self.source_vocabulary = network.max_length, network.source_vocabulary
        self.layers = len(network.layers)
        self.embed, self.head = network.embed, network.head
        self.cache_nbytes = network.cache_nbytes
        self._encoder = network
        self._encodings: WeakValueDictionary[tuple[int, ...], mx.array] = WeakValueDictionary()
        self._tables: list[mx.array] = []
        self._reach = 0

    def prefill_nbytes(self, prompt: int, step: int) -> int:
        return self.network.source_nbytes(prompt)

    @cached_property
    def exact(self) -> ExactPasses:
        prompt = [token % self.vocabulary for token in range(2, 12)]
        return try_exact(lambda: self.open_batch([prompt]), self.vocabulary)

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        return [*self.network.start]

    def reaching(self, length: int) -> EncoderDecoderModel:
        return self

    def caution(self, prompt_tokens: int) -> str:
        """See `Base`. Most models also work with sources that are longer than those in training."""
        trained = self.network.trained_length
        if prompt_tokens <= trained:
            return ""
        takes = show_size(self.network.source_nbytes(prompt_tokens))
        return (
            f"the prompt has {prompt_tokens:,} tokens, and the model was trained on {trained:,} at "
            f"most: the text may be worse, and reading the prompt takes about {takes} of memory"
        )

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> EncoderDecoderContext:
        """See `types.Model`. The first pass encodes all new sources at once."""
        for prompt in prompts:
            check_prompt(prompt, self.source_vocabulary or self.vocabulary, self.max_length)
            self.network.check_source(prompt)
        snapshots = {row: c.arrays for row, c in enumerate(cached) if c and c.is_snapshot}

        def read() -> EncodedSources:
            parts: dict[int, EncodedSources] = {}
            for row, prompt in enumerate(prompts):
                # Batches may change the bits of an encoded source.
                shares = self._shares and not rows_stand_alone()
                encoded = self._encodings.get(tuple(prompt)) if shares else None
                if row in snapshots:
                    parts[row] = EncodedSources(snapshots[row][:1], snapshots[row][1:])
                elif encoded is not None:
                    parts[row] = EncodedSources((encoded,), self.network.project_encoded(encoded))
            new = [row for row in range(len(prompts)) if row not in parts]
            first = [self._encoded([prompts[row] for row in new])] if new else []
            source = reduce(EncodedSources.merge, [*first, *parts.values()])
            if (order := [*new, *parts]) != sorted(order):
                source = source.keep([order.index(row) for row in range(len(order))])
            if self._shares:
                self._encodings.update(zip(map(tuple, prompts), source.encoded, strict=True))
            return source

        return EncoderDecoderContext(self, read, len(prompts))

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> EncodedSources:
        lengths = tuple(map(len, prompts))
        # An exact pass would hide the later tokens of a source from each token. A source is always
        # encoded as a whole, so that its bits are the same.
        with exact_pass(0):
            encoded = self._encoder.encode(rectangle(prompts), padding_mask(lengths))
            projected = self.network.project_encoded(encoded)
        outputs = tuple(encoded[row : row + 1, :length] for row, length in enumerate(lengths))
        return EncodedSources(outputs, projected)

    def capture(self, name: str) -> int:
        """See `Base`. Return the number of the hidden state among the results of
        `Network.decode`."""
        return -1 if name == FINAL else layer_of(name, self.layers)

    def share_encoder(self, target: EncoderDecoderModel) -> None:
        """Encode with the target's encoder from now on, and use the target's encodings of sources
        that it still holds."""
        self._encoder, self._encodings = target.network, target._encodings
        self._shares = target._shares = True

    def tables(self, place: Place) -> list[mx.array]:
        if place.end > self._reach:
            self._reach = -(-place.end // STEP) * STEP
            self._tables = self.network.tables(self._reach)
            mx.eval(self._tables)
        return self._tables


def share_equal_encoder(draft: object, target: object) -> bool:
    """Let a draft use the target's encoder if both models are of the same class, and their encoders
    have equal tensors and equal outputs. Return whether it does."""
    models = [model for model in (draft, target) if isinstance(model, EncoderDecoderModel)]
    if len(models) < 2 or type(models[0].network) is not type(models[1].network):
        return False
    parameters = [tree_flatten(model.network.parameters()) for model in models]
    drafts, targets = ({n: a for n, a in arrays if ENCODER.match(n)} for arrays in parameters)
    equal = drafts.keys() == targets.keys() and all(_equal(drafts[n], targets[n]) for n in drafts)
    # Some settings do not show in the tensors, but in the outputs.
    probe = mx.arange(min(8, models[0].vocabulary))[None]
    if not equal or not _equal(*(model.network.encode(probe) for model in models)):
        return False
    models[0].network.update(tree_unflatten(list(targets.items())))
    lighten(models[0].network)
    models[0].share_encoder(models[1])
    return True


def _equal(first: mx.array, second: mx.array) -> bool:
    return first.dtype == second.dtype and bool(mx.array_equal(first, second))


class EncoderDecoderContext(RowsContext):
    """A `types.Context` of `count` sequences. `read` encodes the sources; it is called when
    they are first needed."""

    def __init__(
        self, model: EncoderDecoderModel, read: Callable[[], EncodedSources], count: int
    ) -> None:
        rows = Rows(count)
        super().__init__(rows, [KVCache(rows) for _ in range(model.layers)])
        self._model = model
        self._read = read
        self._encoded: EncodedSources | None = None

    @property
    def _source(self) -> EncodedSources:
        if self._encoded is None:
            self._encoded = self._read()
            if self._model.network.merged:
                rows = [self._encoded.arrays(row)[1:] for row in range(len(self.lengths))]
                for buffer, arrays in zip(self._buffers(), zip(*rows, strict=True), strict=True):
                    buffer.hold(arrays)
                self._rows.ahead = self._encoded.lengths
                self._encoded = EncodedSources(self._encoded.encoded)
        return self._encoded

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        model, source = self._model, self._source
        places = {name: model.capture(name) for name in hidden}
        place = self._rows.advance(tokens, proposed)
        outputs = model.network.decode(tokens, self._caches, source, place, model.tables(place))
        states = [begin(output) for output in outputs]
        named = {name: states[at] for name, at in places.items()}
        return Scores(model.head(states[-1]), named, source.encoded)

    def evaluate(self) -> None:
        mx.eval(self._source.projected, [cache.state for cache in self._caches])
        mx.clear_cache()

    def merge(self, joining: Context) -> None:
        assert isinstance(joining, EncoderDecoderContext)
        source = self._source.merge(joining._source)
        super().merge(joining)
        self._encoded = source

    def keep(self, rows: Sequence[int]) -> None:
        source = self._source.keep(rows)
        super().keep(rows)
        self._encoded = source

    def snapshot(self, sequence: int) -> Reusable:
        source, row = self._source, slice(sequence, sequence + 1)
        length, arrays = source.lengths[sequence], source.arrays(sequence)
        if self._model.network.merged:
            arrays += tuple(buffer.array[row, :, :length] for buffer in self._buffers())
        return Reusable(snapshot=Cached(length, arrays, is_snapshot=True, exact=True))
