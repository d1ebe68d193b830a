"""Contexts of encoder-decoder models, and what a family's arithmetic has to give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...checkpoints import disk as sizes
from ...errors import PromptError
from ...interfaces import FINAL, Context, Scores, rectangle
from ...interfaces.results import Cached, Reusable, Snapshot
from ...text.tokenizer import Kind
from ..base import check_prompt, layer_of
from ..cpu_layers import begin, lighten
from ..kv_cache import STEP, KVCache, padded
from ..number_format import nbytes
from ..rows import Place, Rows, RowsContext
from .layers import SOURCE_ROWS, Attention, KeysValues, WholeTexts

ENCODER = re.compile(r"(model\.)?(encoder|shared)\.")
"""What the names of an encoder's tensors begin with."""
Caches = Sequence[KVCache]
"""Of each of the decoder's layers."""
Tables = Sequence[mx.array]
"""What `Network.tables` returns."""


class Network(nn.Module):
    """The arithmetic of an encoder-decoder. Parameters are named as in Hugging Face checkpoints.

    model_type: the family's name in `families.ENCODER_DECODERS`. vocabulary: width of the logits.
    source_vocabulary: of the encoder, where it has one of its own. width: of the encoder's output
    and of hidden states. start: the tokens that every text begins with, at least one. max_length:
    tokens of a source, and of a text, at most; None for any number. trained_length: tokens of the
    longest sources in training. heads, inner: of a layer of the encoder, and the width inside its
    feed-forward network. row: numbers in the keys and values of a position, of all layers. merged:
    whether one softmax is over the source and the text, so that caches begin with the source's
    columns. note: a line for the user on what is left out of the checkpoint, or computed in another
    type."""

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
        """The decoder's."""
        return list(self.model.decoder.layers)

    @property
    def dtype(self) -> mx.Dtype:
        """Of hidden states, and of norms, which are never quantized."""
        parts = tree_flatten(self.layers[0].parameters())
        return next(array.dtype for name, array in parts if "norm" in name)

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's part of every layer; see `EncoderDecoderFamily.check_shares`."""
        raise NotImplementedError

    def check_source(self, prompt: Sequence[int]) -> None:
        """Raise PromptError for a source that the model cannot read."""

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width), what the decoder's first layer is given."""
        raise NotImplementedError

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        """(batch, n) int32 -> (batch, n, width). mask: (batch, n) bool, False for padding."""
        raise NotImplementedError

    def source_attention(self, layer: nn.Module) -> Attention:
        """Return the attention of a decoder's layer to the encoder's output."""
        raise NotImplementedError

    def project_encoded(self, encoded: mx.array) -> list[mx.array]:
        """Return keys and values of the encoder's output, of each decoder layer in turn."""
        pairs = (self.source_attention(layer).keys_values(encoded) for layer in self.layers)
        # Every later pass would copy a transposed view.
        return [mx.contiguous(each) for pair in pairs for each in pair]

    def tables(self, reach: int) -> list[mx.array]:
        """Return what is computed once of the first `reach` positions of a text; mostly nothing."""
        return []

    def decode(
        self, tokens: mx.array, caches: Caches, source: Source, place: Place, tables: Tables
    ) -> Iterator[mx.array]:
        """Yield the output of each layer for (batch, m) int32 tokens at `place`, and then the input
        of the head: (batch, m, width) each."""
        raise NotImplementedError

    def head(self, states: mx.array) -> mx.array:
        """(batch, m, width) -> logits (batch, m, vocabulary)."""
        raise NotImplementedError

    def teach(self, sources: mx.array, mask: mx.array, tokens: mx.array) -> mx.array:
        """Return the input of the head for whole texts, without caches: (batch, m, width).
        sources, mask: as of `encode`. tokens: (batch, m) int32."""
        batch, rows = tokens.shape
        encoded, starts = self.encode(sources, mask), (0,) * batch
        given = Source((encoded,), self.project_encoded(encoded)).by_layer
        source: Any = SimpleNamespace(by_layer=given, mask=mask, lengths=starts)
        caches: Any = [WholeTexts(each if self.merged else ()) for each in given]
        *_, states = self.decode(tokens, caches, source, Place(starts, rows), self.tables(rows))
        return states

    def source_nbytes(self, length: int) -> int:
        """Estimate the bytes that `encode` and `project_encoded` take for a source."""
        scores = 5 * self.heads * min(length, SOURCE_ROWS)
        states = 6 * self.width + 3 * self.inner + (1 + self.merged) * self.row
        return length * (scores + states) * self.dtype.size

    def cache_nbytes(self, source: int, columns: int) -> int:
        """Bytes of the encoder's output, and of all keys and values, in whole steps."""
        outside = 0 if self.merged else source
        whole = outside + -(-(source - outside + columns) // STEP) * STEP
        return self.dtype.size * (source * self.width + whole * self.row)


@dataclass(frozen=True)
class Source:
    """What was computed of the sources of a batch. encoded: the encoder's output for each, (1, n,
    d_model) without padding. projected: the keys and values of it, of each decoder layer in turn,
    or none where they lie in the caches."""

    encoded: tuple[mx.array, ...]
    projected: Sequence[mx.array] = ()

    @property
    def by_layer(self) -> list[KeysValues]:
        return list(zip(self.projected[::2], self.projected[1::2], strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(each.shape[1] for each in self.encoded)

    @cached_property
    def mask(self) -> mx.array | None:
        return padding_mask(self.lengths)

    def arrays(self, row: int) -> tuple[mx.array, ...]:
        rows, length = slice(row, row + 1), self.lengths[row]
        return (self.encoded[row], *(each[rows, :, :length] for each in self.projected))

    def join(self, other: Source) -> Source:
        longest = max(self.lengths + other.lengths)
        both = zip(self.projected, other.projected, strict=True)
        joined = [mx.concatenate([padded(each, longest) for each in pair]) for pair in both]
        return Source(self.encoded + other.encoded, joined)

    def filter(self, keep: Sequence[int]) -> Source:
        encoded = tuple(self.encoded[row] for row in keep)
        index, longest = mx.array(list(keep), dtype=mx.int32), max(e.shape[1] for e in encoded)
        return Source(encoded, [each[index, :, :longest] for each in self.projected])


def padding_mask(lengths: Sequence[int]) -> mx.array | None:
    """(batch, longest) bool, False for padding; None where there is none."""
    if min(lengths) == max(lengths):
        return None
    return mx.arange(max(lengths)) < mx.array(list(lengths))[:, None]


class EncoderDecoderModel:
    """base.Base over a Network; prompts are source texts."""

    kind: Kind = "encoder-decoder"
    # Masks do not depend on the number of rows.
    rows_agree = batches = True
    why_not_batched = why_not_exact = ""
    _shares = False

    def __init__(self, network: Network, identity: str | None = None) -> None:
        lighten(network)
        self.network = network
        self.identity = identity
        self.vocabulary, self.width = network.vocabulary, network.width
        self.max_length, self.source_vocabulary = network.max_length, network.source_vocabulary
        self.layers = len(network.layers)
        self.embed, self.head = network.embed, network.head
        self.cache_nbytes = network.cache_nbytes
        self._encoder = network
        self._encodings: WeakValueDictionary[tuple[int, ...], mx.array] = WeakValueDictionary()
        self._tables: list[mx.array] = []
        self._reach = 0

    @cached_property
    def nbytes(self) -> int:
        return nbytes(self.network)

    @property
    def holds_scores(self) -> bool:
        """False: the prompt is the encoder's, which divides its rows itself."""
        return False

    def reading_nbytes(self, prompt: int, step: int) -> int:
        return self.network.source_nbytes(prompt)

    @property
    def state_dtype(self) -> mx.Dtype:
        return self.network.dtype

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        return [*self.network.start]

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> EncoderDecoderContext:
        return self.open_batch([prompt], [cached])

    def caution(self, prompt_tokens: int) -> str:
        """Most positions go on working beyond the sources that the model was trained on."""
        trained = self.network.trained_length
        if prompt_tokens <= trained:
            return ""
        nbytes, most = self.network.source_nbytes(prompt_tokens), sizes.usable_memory()
        takes = f"reading the prompt takes about {sizes.show(nbytes)} of memory"
        given = f"the prompt has {prompt_tokens:,} tokens, and"
        if self.nbytes + nbytes > most:
            models = f"models may take {sizes.show(most)} on this machine"
            raise PromptError(f"{given} {takes}, where {models}: shorten it")
        worse = f"the model was trained on {trained:,} at most: the text may be worse"
        return f"{given} {worse}, and {takes}"

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> EncoderDecoderContext:
        """The first pass runs the encoder over all new sources at once."""
        for prompt in prompts:
            check_prompt(prompt, self.source_vocabulary or self.vocabulary, self.max_length)
            self.network.check_source(prompt)
        known = {row: each.arrays for row, each in enumerate(cached) if isinstance(each, Snapshot)}

        def read() -> Source:
            parts = {row: Source(each[:1], each[1:]) for row, each in known.items()}
            for row, prompt in enumerate(prompts):
                encoded = self._encodings.get(tuple(prompt)) if self._shares else None
                if row not in parts and encoded is not None:
                    parts[row] = Source((encoded,), self.network.project_encoded(encoded))
            new = [row for row in range(len(prompts)) if row not in parts]
            first = [self._encoded([prompts[row] for row in new])] if new else []
            source = reduce(Source.join, [*first, *parts.values()])
            if (order := [*new, *parts]) != sorted(order):
                source = source.filter([order.index(row) for row in range(len(order))])
            if self._shares:
                self._encodings.update(zip(map(tuple, prompts), source.encoded, strict=True))
            return source

        return EncoderDecoderContext(self, read, len(prompts))

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> Source:
        lengths = tuple(map(len, prompts))
        encoded = self._encoder.encode(rectangle(prompts), padding_mask(lengths))
        each = tuple(encoded[row : row + 1, :length] for row, length in enumerate(lengths))
        return Source(each, self.network.project_encoded(encoded))

    def share_encoder(self, target: EncoderDecoderModel) -> None:
        """Encode with the target's encoder from now on, and no source that the target has encoded
        for a text that is still there."""
        self._encoder, self._encodings = target.network, target._encodings
        self._shares = target._shares = True

    def tables(self, place: Place) -> list[mx.array]:
        if place.end > self._reach:
            self._reach = -(-place.end // STEP) * STEP
            self._tables = self.network.tables(self._reach)
            mx.eval(self._tables)
        return self._tables


def share_equal_encoder(draft: object, target: object) -> bool:
    """Share the target's encoder with a draft of the same arithmetic whose encoder has the same
    tensors and computes the same. Returns whether it does."""
    models = [model for model in (draft, target) if isinstance(model, EncoderDecoderModel)]
    if len(models) < 2 or type(models[0].network) is not type(models[1].network):
        return False
    parameters = [tree_flatten(model.network.parameters()) for model in models]
    ours, theirs = ({n: a for n, a in every if ENCODER.match(n)} for every in parameters)
    equal = ours.keys() == theirs.keys() and all(_equal(ours[n], theirs[n]) for n in ours)
    # Not every setting shows in a tensor.
    probe = mx.arange(min(8, models[0].vocabulary))[None]
    if not equal or not _equal(*(model.network.encode(probe) for model in models)):
        return False
    models[0].network.update(tree_unflatten(list(theirs.items())))
    models[0].share_encoder(models[1])
    return True


def _equal(first: mx.array, second: mx.array) -> bool:
    return first.dtype == second.dtype and bool(mx.array_equal(first, second))


class EncoderDecoderContext(RowsContext):
    """interfaces.Context of `count` sequences. read: encodes their sources when first needed."""

    def __init__(self, model: EncoderDecoderModel, read: Callable[[], Source], count: int) -> None:
        rows = Rows(count)
        super().__init__(rows, [KVCache(rows) for _ in range(model.layers)])
        self._model = model
        self._read = read
        self._given: Source | None = None

    @property
    def _source(self) -> Source:
        if self._given is None:
            self._given = self._read()
            if self._model.network.merged:
                rows = [self._given.arrays(row)[1:] for row in range(len(self.lengths))]
                for buffer, arrays in zip(self._buffers(), zip(*rows, strict=True), strict=True):
                    buffer.hold(arrays)
                self._rows.ahead = self._given.lengths
                self._given = Source(self._given.encoded)
        return self._given

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        model, source = self._model, self._source
        places = {name: -1 if name == FINAL else layer_of(name, model.layers) for name in taps}
        place = self._rows.advance(tokens, proposed)
        given = tokens, self._caches, source, place, model.tables(place)
        states = [begin(each) for each in model.network.decode(*given)]
        hidden = {name: states[at] for name, at in places.items()}
        return Scores(model.head(states[-1]), hidden, source.encoded)

    def evaluate(self) -> None:
        mx.eval(self._source.projected, [cache.state for cache in self._caches])
        mx.clear_cache()

    def join(self, other: Context) -> None:
        assert isinstance(other, EncoderDecoderContext)
        source = self._source.join(other._source)
        super().join(other)
        self._given = source

    def filter(self, keep: Sequence[int]) -> None:
        source = self._source.filter(keep)
        super().filter(keep)
        self._given = source

    def reusable(self, sequence: int) -> Reusable:
        source, row = self._source, slice(sequence, sequence + 1)
        length, arrays = source.lengths[sequence], source.arrays(sequence)
        if self._model.network.merged:
            arrays += tuple(buffer.array[row, :, :length] for buffer in self._buffers())
        return Reusable(snapshot=Snapshot(length, None, arrays, exact=True))
