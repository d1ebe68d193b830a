"""T5 as a Model, and the state of one sequence in it.

The encoder runs once a sequence; cross-attention keys and values are projected once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
from mlx.utils import tree_flatten

from ..checkpoints.disk import sizes
from ..contracts import FINAL, Scores
from .base import BatchPass, check_prompt, check_rewind, count_rows
from .kv_cache import STEP, KVCache
from .t5 import T5
from .taps import layer_of


class EncoderDecoderModel:
    """base.Base over a T5; prompts are source texts."""

    def __init__(self, network: T5) -> None:
        self.network = network
        self._tables: list[mx.array] = []
        self._reach = 0

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return self.network.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """None: relative positions have no end."""
        return None

    @cached_property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(array.nbytes for _, array in tree_flatten(self.network.parameters()))

    @property
    def width(self) -> int:
        """Width of the decoder's hidden states."""
        return self.network.config.d_model

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden states."""
        return self.network.decoder.final_layer_norm.weight.dtype

    @property
    def layers(self) -> int:
        """How many layers the decoder has."""
        return len(self.network.decoder.block)

    @property
    def rows_agree(self) -> bool:
        """True: masks are our own."""
        return True

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width), what the decoder's first layer is given."""
        return self.network.shared(tokens)

    def head(self, states: mx.array) -> mx.array:
        """The output head: (batch, m, width), as the hidden state FINAL is -> logits."""
        return self.network.head(states)

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The decoder's start token."""
        return [self.network.config.decoder_start_token_id]

    def open(self, prompt: Sequence[int]) -> EncoderDecoderContext:
        """A context whose source is encoded and projected with the first pass.

        Raises PromptError for an empty prompt, or one with ids that the model does not have.
        """
        check_prompt(prompt, self.vocabulary, None)
        encoded = self.network.encode(mx.array([list(prompt)], dtype=mx.int32))
        return EncoderDecoderContext(self, self.network.project_encoded(encoded))

    def caution(self, prompt_tokens: int) -> str:
        """Beyond the sources that the model was trained on, relative positions go on working."""
        trained = self.network.config.trained_length
        if prompt_tokens <= trained:
            return ""
        takes = sizes.show(self.network.source_nbytes(prompt_tokens))
        return (
            f"the prompt has {prompt_tokens:,} tokens, and the model was trained on {trained:,} at "
            f"most: the text may be worse, and reading the prompt takes about {takes} of memory"
        )

    def open_batch(self, prompts: Sequence[Sequence[int]]) -> BatchPass:
        """The encoder runs over all sources at once; as base.Base says."""
        for prompt in prompts:
            check_prompt(prompt, self.vocabulary, None)
        longest = max(len(prompt) for prompt in prompts)
        # What stands in the place of padding is hidden.
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        lengths = mx.array([[len(prompt)] for prompt in prompts])
        mask = mx.arange(longest) < lengths
        encoded = self.network.encode(mx.array(padded, dtype=mx.int32), mask)
        projected = self.network.project_encoded(encoded)
        mx.eval(projected)
        caches = [KVCache() for _ in projected]

        def advance(tokens: mx.array) -> mx.array:
            masks = self.masks(caches[0].length, tokens.shape[1])
            states = self.network.decode(tokens, caches, projected, masks, mask)
            return self.network.head(states)

        return advance

    def masks(self, start: int, rows: int) -> list[mx.array]:
        """Per decoder layer what is added to the scores of positions start .. start + rows - 1."""
        if start + rows > self._reach:
            self._reach = -(-(start + rows) // STEP) * STEP
            self._tables = self.network.decoder.bias_tables(self._reach)
            mx.eval(self._tables)
        return self.network.decoder.masks(self._tables, self._reach, start, rows)


class EncoderDecoderContext:
    """contracts.Context: one sequence in the making.

    source: per decoder layer the cross-attention's keys and values of the encoder output.
    """

    def __init__(self, model: EncoderDecoderModel, source: list[tuple[mx.array, mx.array]]) -> None:
        self._model = model
        self._source = source
        self._caches = [KVCache() for _ in source]
        self._final = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the target text seen."""
        return (self._caches[0].length,)

    @property
    def replays(self) -> bool:
        """False: rewinding is free."""
        return False

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """As contracts.Context says."""
        rows, start = count_rows(tokens, proposed), self.lengths[0]
        layers = {n: layer_of(n, self._model.layers) for n in taps if n != FINAL}
        network, masks = self._model.network, self._model.masks(start, rows)
        outputs: list[mx.array] | None = [] if taps else None
        states = network.decode(tokens, self._caches, self._source, masks, outputs=outputs)
        if proposed < rows:
            self._final = start + rows - proposed
        hidden = {n: outputs[layers[n]] if n in layers else states for n in taps} if outputs else {}
        return Scores(network.head(states), hidden)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """As contracts.Context says; exact and free."""
        length = check_rewind(lengths, self._final, self.lengths[0])
        for cache in self._caches:
            cache.rewind(length)
        self._final = length

    def evaluate(self) -> None:
        """As contracts.Context says."""
        mx.eval(self._source, [cache.state for cache in self._caches])
        mx.clear_cache()
