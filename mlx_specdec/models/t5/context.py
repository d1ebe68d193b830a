"""What a T5 has computed of the sources of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import mlx.core as mx

from ...checkpoints import disk as sizes
from ...errors import PromptError
from ...interfaces import FINAL, Context, Scores, rectangle
from ...interfaces.results import Cached, Reusable, Snapshot
from ..base import check_prompt, layer_of
from ..kv_cache import STEP, KVCache, padded
from ..number_format import nbytes
from ..rows import Place, Rows, RowsContext
from .network import T5, KeysValues


@dataclass(frozen=True)
class Source:
    """What was computed of the sources of a batch. encoded: the encoder's output for each, (1, n,
    d_model) without padding. projected: the keys and values of it, by decoder layer."""

    encoded: tuple[mx.array, ...]
    projected: Sequence[KeysValues]

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> Source:
        encoded, *parts = arrays
        return cls((encoded,), list(zip(parts[::2], parts[1::2], strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(each.shape[1] for each in self.encoded)

    @cached_property
    def mask(self) -> mx.array | None:
        return padding_mask(self.lengths)

    def arrays(self, row: int) -> tuple[mx.array, ...]:
        rows, length = slice(row, row + 1), self.lengths[row]
        parts = (each[rows, :, :length] for pair in self.projected for each in pair)
        return (self.encoded[row], *parts)

    def join(self, other: Source) -> Source:
        longest = max(self.lengths + other.lengths)
        projected = [
            [
                mx.concatenate([padded(own[part], longest), padded(its[part], longest)])
                for part in (0, 1)
            ]
            for own, its in zip(self.projected, other.projected, strict=True)
        ]
        return Source(self.encoded + other.encoded, projected)

    def filter(self, keep: Sequence[int]) -> Source:
        encoded = tuple(self.encoded[row] for row in keep)
        index, longest = mx.array(list(keep), dtype=mx.int32), max(e.shape[1] for e in encoded)
        projected = [
            (keys[index, :, :longest], values[index, :, :longest])
            for keys, values in self.projected
        ]
        return Source(encoded, projected)


def padding_mask(lengths: Sequence[int]) -> mx.array | None:
    """(batch, longest) bool, False for padding; None where there is none."""
    if min(lengths) == max(lengths):
        return None
    return mx.arange(max(lengths)) < mx.array(list(lengths))[:, None]


class EncoderDecoderModel:
    """base.Base over a T5; prompts are source texts."""

    max_length: int | None = None
    # A T5's masks do not depend on the number of rows.
    rows_agree = batches = True

    def __init__(self, network: T5, identity: str | None = None) -> None:
        self.network = network
        self.identity = identity
        self.vocabulary, self.width = network.config.vocab_size, network.config.d_model
        self.layers = len(network.decoder.block)
        self._tables: list[mx.array] = []
        self._reach = 0

    @cached_property
    def nbytes(self) -> int:
        return nbytes(self.network)

    def cache_nbytes(self, source: int, columns: int) -> int:
        return self.network.cache_nbytes(source, columns)

    def reading_nbytes(self, prompt: int, step: int) -> int:
        return self.network.source_nbytes(prompt)

    @property
    def state_dtype(self) -> mx.Dtype:
        return self.network.decoder.final_layer_norm.weight.dtype

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width), what the decoder's first layer is given."""
        return self.network.shared(tokens)

    def head(self, states: mx.array) -> mx.array:
        """The output head: (batch, m, width), as the hidden state FINAL is -> logits."""
        return self.network.head(states)

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        return [self.network.config.decoder_start_token_id]

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> EncoderDecoderContext:
        return self.open_batch([prompt], [cached])

    def caution(self, prompt_tokens: int) -> str:
        """Relative positions go on working beyond the sources that the model was trained on."""
        trained = self.network.config.trained_length
        if prompt_tokens <= trained:
            return ""
        takes_nbytes, memory = self.network.source_nbytes(prompt_tokens), sizes.usable_memory()
        takes = f"reading the prompt takes about {sizes.show(takes_nbytes)} of memory"
        if self.nbytes + takes_nbytes > memory:
            raise PromptError(
                f"the prompt has {prompt_tokens:,} tokens, and {takes}, where models may take "
                f"{sizes.show(memory)} on this machine: shorten it"
            )
        return (
            f"the prompt has {prompt_tokens:,} tokens, and the model was trained on {trained:,} at "
            f"most: the text may be worse, and {takes}"
        )

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> EncoderDecoderContext:
        """The first pass runs the encoder over all new sources at once."""
        for prompt in prompts:
            check_prompt(prompt, self.vocabulary, None)
        known = {row: each for row, each in enumerate(cached) if isinstance(each, Snapshot)}
        new = [row for row in range(len(prompts)) if row not in known]

        def read() -> Source:
            parts = [Source.of(each.arrays) for each in known.values()]
            if new:
                parts.insert(0, self._encoded([prompts[row] for row in new]))
            source = reduce(Source.join, parts)
            order = [*new, *known]
            sorted_rows = [order.index(row) for row in range(len(order))]
            return source if order == sorted(order) else source.filter(sorted_rows)

        return EncoderDecoderContext(self, read, len(prompts))

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> Source:
        lengths = tuple(map(len, prompts))
        encoded = self.network.encode(rectangle(prompts), padding_mask(lengths))
        each = tuple(encoded[row : row + 1, :length] for row, length in enumerate(lengths))
        return Source(each, self.network.project_encoded(encoded))

    def masks(self, place: Place) -> list[mx.array]:
        if place.end > self._reach:
            self._reach = -(-place.end // STEP) * STEP
            self._tables = self.network.decoder.bias_tables(self._reach)
            mx.eval(self._tables)
        positions = place.positions[:1] if place.even else place.positions
        return self.network.decoder.masks(self._tables, self._reach, positions)


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
        return self._given

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        layers = {n: layer_of(n, self._model.layers) for n in taps if n != FINAL}
        network, source = self._model.network, self._source
        masks = self._model.masks(self._rows.advance(tokens, proposed))
        outputs: list[mx.array] | None = [] if taps else None
        states = network.decode(
            tokens, self._caches, source.projected, masks, source.mask, outputs=outputs
        )
        hidden = {n: outputs[layers[n]] if n in layers else states for n in taps} if outputs else {}
        return Scores(network.head(states), hidden, source.encoded)

    def evaluate(self) -> None:
        mx.eval(self._source.projected, [cache.state for cache in self._caches])
        mx.clear_cache()

    def join(self, other: Context) -> None:
        assert isinstance(other, EncoderDecoderContext)
        super().join(other)
        self._given = self._source.join(other._source)

    def filter(self, keep: Sequence[int]) -> None:
        super().filter(keep)
        self._given = self._source.filter(keep)

    def reusable(self, sequence: int) -> Reusable:
        length = self._source.lengths[sequence]
        return Reusable(snapshot=Snapshot(length, None, self._source.arrays(sequence), exact=True))
