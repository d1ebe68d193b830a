"""Which caches a decoder-only model is given: its own, quantized ones, or windows of a given size.

What a model cannot use is refused here, before anything is decoded.
A quantized cache is one from the first token on, so that no pass sees it change, and a window
keeps no first tokens: mlx-lm masks those away in passes of several rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ...errors import CheckpointError, OptionError, first_line
from ...interfaces import FINAL, Context, Scores
from ...interfaces.reusable import Kept, Whole
from .. import agreement
from ..base import check_prompt
from ..cache_settings import CacheSettings
from ..kv_cache import STEP
from .context import DecoderOnlyContext, MakeCache, ReplayingContext, batched, fits, mask_axes
from .row_check import ATTEMPTS, rows_agree
from .taps import Shown, Tap, inner_of, layer_of, lent_of, state_of, tapped

MakeCaches = Callable[[], list[Any]]


def cache_maker(network: nn.Module, settings: CacheSettings) -> MakeCaches:
    """A function that makes a sequence's empty caches, one entry a layer.

    Raises OptionError where the model cannot work with such caches.
    """
    if settings.bits is None and settings.max_size is None:
        return lambda: make_prompt_cache(network)
    own = make_prompt_cache(network)
    others = sorted({type(cache).__name__ for cache in own if type(cache) is not KVCache})
    if others:
        flag = "max-kv-size" if settings.bits is None else "kv-bits"
        raise OptionError(
            f"{_name(network)} models bring caches of their own ({', '.join(others)}): leave "
            f"{flag} out"
        )
    if settings.max_size is not None:
        size = settings.max_size
        return lambda: [RotatingKVCache(max_size=size, keep=0) for _ in own]

    def quantized() -> list[Any]:
        bits = settings.bits or 8
        return [QuantizedKVCache(group_size=settings.group_size, bits=bits) for _ in own]

    _try(network, quantized(), settings)
    return quantized


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a sequence's caches. always: of recurrent state. per_column: for each token in the
    caches, by the most tokens that they hold; None is no limit."""

    always: int
    per_column: Mapping[int | None, int]

    def of(self, columns: int) -> int:
        """Return the bytes with `columns` tokens in the caches; buffers grow in steps."""
        held = -(-columns // STEP) * STEP
        growing = (n * min(held, most or held) for most, n in self.per_column.items())
        return self.always + sum(growing)


def sizes_of(caches: Sequence[Any]) -> CacheSizes:
    """Return the sizes of caches that have seen a token; nothing is computed for it."""
    always, per_column = 0, Counter[int | None]()
    for cache in caches:
        keys = getattr(cache, "keys", None)
        if isinstance(cache, CacheList):
            inner = sizes_of(cache.caches)
            always += inner.always
            per_column.update(inner.per_column)
        elif keys is None:
            always += int(cache.nbytes)
        else:
            columns = (keys[0] if isinstance(keys, tuple) else keys).shape[-2]
            most = getattr(cache, "max_size", None)
            if isinstance(cache, ChunkedKVCache):
                most = cache.chunk_size + STEP
            per_column[most] += int(cache.nbytes) // columns
    return CacheSizes(always, per_column)


def _try(network: nn.Module, caches: list[Any], settings: CacheSettings) -> None:
    # Shapes are checked as soon as the graph is built; nothing is computed.
    try:
        network(mx.zeros((1, 2), dtype=mx.int32), cache=caches)
    except ValueError as problem:
        raise OptionError(
            f"{_name(network)} cannot use a quantized cache with groups of "
            f"{settings.group_size}: {first_line(problem)}"
        ) from None
    except Exception as problem:
        # Arithmetic of its own, which takes no packed keys.
        raise OptionError(
            f"{_name(network)} models cannot read a quantized cache: leave kv-bits out"
        ) from problem


def _name(network: nn.Module) -> str:
    return type(network).__module__.rpartition(".")[2]


class DecoderOnlyModel:
    """base.Base over an mlx-lm model.

    model: the loaded module, called as `model(tokens, cache=entries)`; kept as `network`.
    max_length: longest committed text in tokens, or None. caches: raises OptionError for kinds that
    the model cannot use. identity: as base.Base says. group: of the ranks that share the model;
    every pass is then submitted at once as far as they work on it together.
    pipeline: they share its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        max_length: int | None = None,
        caches: CacheSettings | None = None,
        identity: str | None = None,
        group: mx.distributed.Group | None = None,
        *,
        pipeline: bool = False,
    ) -> None:
        self.network = model
        self.group = group
        self._pipeline = pipeline
        self.identity = identity
        self._max_length = max_length
        self._make_caches = cache_maker(model, caches or CacheSettings())
        self._quantizes_cache = caches is not None and caches.bits is not None
        self._taps: dict[str, Tap] = {}
        self._first: Tap | None = None
        self._state: tuple[int, mx.Dtype] | None = None
        # Shapes are known as soon as the graph is built; nothing is computed here.
        probe = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
        self._vocabulary: int = probe.shape[-1]
        masked = getattr(model, "_dummy_tokenizer_ids", None)  # of phi3small
        if masked is not None and (most := max(masked.tolist())) >= self._vocabulary:
            raise CheckpointError(
                f"mlx-lm masks token ids up to {most} of this type of model, and config.json has a "
                f"vocabulary of {self._vocabulary}: to write past its end would end the process"
            )

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""
        return self._vocabulary

    @property
    def max_length(self) -> int | None:
        """Longest committed text in tokens, prompt included; None where there is no hard limit."""
        return self._max_length

    @cached_property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(array.nbytes for _, array in tree_flatten(self.network.parameters()))

    def cache_nbytes(self, source: int, columns: int) -> int:
        """As base.Base says."""
        return self._cache_sizes.of(min(columns, self._max_length or columns))

    @cached_property
    def _cache_sizes(self) -> CacheSizes:
        caches = self._make_caches()
        self.network(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        return sizes_of(caches)

    def reading_nbytes(self, prompt: int, step: int) -> int:
        """As base.Base says: the scores of a layer, where no fused kernel does without them."""
        args = getattr(self.network, "args", None)
        inner = getattr(args, "text_config", None)
        heads = (inner if isinstance(inner, Mapping) else vars(args or self)).get(
            "num_attention_heads"
        )
        fused = mx.default_device() != mx.Device(mx.cpu) and not self._quantizes_cache
        return 0 if fused or not isinstance(heads, int) else heads * step * prompt * self._number

    @cached_property
    def _number(self) -> int:
        """Bytes of a number in what is computed."""
        arrays = (array for _, array in tree_flatten(self.network.parameters()))
        floating = (each.dtype.size for each in arrays if mx.issubdtype(each.dtype, mx.floating))
        return max(floating, default=4)

    @property
    def width(self) -> int:
        """Width of the hidden states. Raises OptionError where a model does not show them."""
        return self._seen_state()[0]

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden states. Raises OptionError as `width` does."""
        return self._seen_state()[1]

    @property
    def layers(self) -> int:
        """How many layers put out a hidden state."""
        return len(self.network.layers)  # of a pipeline those of this rank

    @cached_property
    def rows_agree(self) -> bool:
        """As base.Base says; some of mlx-lm's models fail it. Found out when first asked for."""
        return agreement.once(
            self.identity, lambda: rows_agree(self, [self._make_caches() for _ in range(ATTEMPTS)])
        )

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width): what the first layer is given, scaled where the
        family scales it. Raises OptionError where a model does not show it."""
        if self._pipeline:
            raise self._closed("what their first layer is given, in a pipeline")
        # Only the model's own call knows what it does to its embedding.
        self._first = self._first or tapped(self.network.layers[0])
        self._first.stop(True)
        try:
            self.network(tokens, cache=make_prompt_cache(self.network))
        except Shown as shown:
            state = state_of(shown.state)
        else:
            state = None
        finally:
            self._first.stop(False)
        if state is None:
            raise self._closed("what their first layer is given")
        return state

    def head(self, states: mx.array) -> mx.array:
        """The model's own output head: (batch, m, width), as FINAL is -> logits.

        Raises OptionError as `width` does.
        """
        # Heads are scaled, soft-capped or tied: only the model's own call knows how.
        tap = self.tap(FINAL)
        tap.give(states)
        try:
            logits: mx.array = self.network(mx.zeros(states.shape[:2], dtype=mx.int32))
        finally:
            tap.give(None)
        return logits

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The prompt itself."""
        return list(prompt)

    def open(self, prompt: Sequence[int], kept: Kept | None = None) -> Context:
        """A context that has seen nothing but what `kept` is of.

        Raises PromptError for a prompt that is empty, longer than `max_length`, or that holds an id
        outside of the vocabulary.
        """
        check_prompt(prompt, self._vocabulary, self._max_length)
        if self._batched:
            context = DecoderOnlyContext(self, self._batched, 1)
            context.recall([kept])
            return context
        if isinstance(kept, Whole):
            return ReplayingContext(self, copy.deepcopy(kept.value), kept.length)
        return ReplayingContext(self, self._make_caches())

    def caution(self, prompt_tokens: int) -> str:
        """Nothing: what is too long is refused."""
        return ""

    @property
    def batches(self) -> bool:
        """As contracts.Model says; found out when first asked for."""
        return self._mask_axes is not None

    def open_batch(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Kept | None] = ()
    ) -> DecoderOnlyContext:
        """As contracts.Model says."""
        for prompt in prompts:
            check_prompt(prompt, self._vocabulary, self._max_length)
        if self._mask_axes is None:
            raise OptionError(f"{self._kind} models decode one sequence at a time")
        context = DecoderOnlyContext(self, self._batched, len(prompts), self._mask_axes)
        context.recall(kept)
        return context

    @cached_property
    def _mask_axes(self) -> int | None:
        return mask_axes(self, self._batched) if self._batched else None

    @cached_property
    def _batched(self) -> list[MakeCache]:
        """Per layer how to make a batched cache; empty where there is none, or none that fits."""
        made = [batched(own) for own in self._make_caches()]
        kinds = [make for make in made if make is not None]
        return kinds if len(kinds) == len(made) and fits(self, kinds) else []

    def run(self, tokens: mx.array, entries: list[Any] | None, taps: Sequence[str] = ()) -> Scores:
        """One pass over `tokens` (batch, m) int32, which `entries`, the caches, remember; None:
        over whole texts, of which nothing is remembered. taps: hidden states to return."""
        if not taps and self.group is None:
            return Scores(self.network(tokens, cache=entries))
        together = () if self.group is None or FINAL in taps else (FINAL,)
        armed: Mapping[str, Tap] = {name: self.tap(name) for name in (*taps, *together)}
        for tap in armed.values():
            tap.arm()
        logits = self.network(tokens, cache=entries)
        states = {name: state_of(tap.take(), name) for name, tap in armed.items()}
        if self.group is not None:
            # In the order of passes on every rank, whoever looks at the result, and when.
            mx.async_eval(states[FINAL])
        return Scores(logits, {name: state for name, state in states.items() if state is not None})

    def tap(self, name: str) -> Tap:
        """The tap that shows a hidden state; the model is prepared on the first call.

        Raises OptionError for a state that the model does not have or does not show.
        """
        if name not in self._taps:
            inner = name == FINAL
            if self._pipeline and not inner:
                raise OptionError(
                    f"in a pipeline no rank has all layers, and what is {name} is not sent to the "
                    "drafter: take distributed tensor, or another drafter"
                )
            module = inner_of(self.network) if inner else lent_of(name, self.network.layers)
            if module is None:
                module = self.network.layers[layer_of(name, self.layers)]
            tap = tapped(module)
            tap.arm()
            self.network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(self.network))
            state = state_of(tap.take(), name)
            # Some models keep the head inside: what comes out of them are logits.
            if state is None or (inner and state.shape[-1] == self._vocabulary):
                raise self._closed("the input of their head" if inner else f"what is {name}")
            if inner:
                self._state = (state.shape[-1], state.dtype)
            self._taps[name] = tap
        return self._taps[name]

    def _closed(self, what: str) -> OptionError:
        return OptionError(f"models of type {self._kind} do not show {what}")

    @property
    def _kind(self) -> str:
        """mlx-lm's name of the family."""
        return type(self.network).__module__.rpartition(".")[2]

    def _seen_state(self) -> tuple[int, mx.Dtype]:
        """Width and type of the hidden states."""
        self.tap(FINAL)
        return self._state or (0, mx.float32)
