"""A decoder-only model of mlx-lm and its caches: the model's own, quantized ones, or windows.

A quantized cache is quantized from the first token on, so that its type never changes. A window
does not keep the first tokens (attention sinks), because mlx-lm masks them in passes of several
rows."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ...checkpoints.files import text_config
from ...errors import OptionError, first_line
from ...text.tokenizer import Kind
from ...types import Cached, Context, Scores
from ..attention_parts import PROMPT_SIZES
from ..base import Base, check_prompt, family_of
from ..cache_settings import CACHE_GROUP_SIZES, OWN_CACHES, CacheSettings
from ..cpu_layers import lighten
from ..exact import ExactPasses, try_exact
from ..number_format import nbytes, on_cpu
from ..patches import QUANTIZED_ATTENTION
from ..rows import DROP, STEP
from .attention import SCORES_NBYTES, attend_in_parts, divide_recurrences, replace_in
from .caches import MakeCache, batched, copier, leaves
from .context import DecoderOnlyContext
from .mends import factors_of
from .network import CapturingNetwork
from .recurrence import Recurrences
from .trials import absorb, rows_agree, try_batches, try_recurrences


def cache_maker(network: nn.Module, settings: CacheSettings) -> Callable[[], list[Any]]:
    """Return a function that makes the empty caches of one sequence. Raises OptionError if the
    model cannot use caches with these settings."""
    if settings.bits is None and settings.max_size is None:
        return lambda: make_prompt_cache(network)
    caches = make_prompt_cache(network)
    special = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if special:
        flag = "max-kv-size" if settings.bits is None else "kv-bits"
        raise OptionError(
            f"{family_of(network)} models bring caches of their own ({', '.join(special)}): leave "
            f"{flag} out"
        )
    if settings.max_size is not None:
        size = settings.max_size
        return lambda: [RotatingKVCache(max_size=size, keep=0) for _ in caches]

    # MLX checks shapes when the graph is built; nothing is computed.
    token = mx.zeros((1, 2), dtype=mx.int32)
    network(token, cache=caches)
    sizes = {size for both in head_sizes(caches) for size in both}
    fits = [group for group in CACHE_GROUP_SIZES if not any(size % group for size in sizes)]
    if settings.group_size not in fits:
        raise OptionError(
            f"kv-bits quantizes groups of {settings.group_size} values, and the heads of this "
            f"{family_of(network)} model have {' and '.join(map(str, sorted(sizes)))}: "
            + (f"take kv-group-size {max(fits)}" if fits else "leave kv-bits out")
        )
    QUANTIZED_ATTENTION.apply(base, "quantized_scaled_dot_product_attention", attend_in_parts)

    def quantized() -> list[Any]:
        bits = settings.bits or 8
        return [QuantizedKVCache(group_size=settings.group_size, bits=bits) for _ in caches]

    try:
        network(token, cache=quantized())
    except Exception as problem:  # some models compute with the keys, which are packed here
        raise OptionError(
            f"{family_of(network)} cannot use a quantized cache with groups of "
            f"{settings.group_size}: {first_line(problem)}"
        ) from problem
    return quantized


def head_sizes(caches: Sequence[Any]) -> set[tuple[int, int]]:
    """Return all pairs of a key head's and a value head's size in caches that hold a token."""
    plain = [c for c in leaves(caches) if isinstance(getattr(c, "keys", None), mx.array)]
    return {(cache.keys.shape[-1], cache.values.shape[-1]) for cache in plain}


class DecoderOnlyModel(CapturingNetwork):
    """A base.Base over a model of mlx-lm.

    Args:
        model: The network.
        max_length: The largest number of tokens in a sequence, or None if there is no limit.
        caches: Settings of the KV cache.
        identity: See base.Base.
        group, pipeline: See CapturingNetwork.
    Raises:
        OptionError: If the model cannot use such caches."""

    kind: Kind = "decoder-only"
    source_vocabulary: int | None = None
    lost = False

    def __init__(
        self,
        model: nn.Module,
        max_length: int | None = None,
        caches: CacheSettings = OWN_CACHES,
        identity: str | None = None,
        group: mx.distributed.Group | None = None,
        *,
        pipeline: bool = False,
    ) -> None:
        lighten(model)
        if not on_cpu():
            replace_in(model)
        super().__init__(model, group, pipeline=pipeline)
        self._factors, self._long, self._twin = factors_of(model), True, self
        self.family, self.identity = family_of(model), identity
        self.max_length = max_length
        self._make_caches = cache_maker(model, caches)
        self._batched_caches = list(map(batched, self._make_caches()))
        self._quantizes_cache = caches.bits is not None

    @cached_property
    def nbytes(self) -> int:
        return nbytes(self.network)

    def reaching(self, length: int) -> Base:
        if self._factors is None or self._long == (length > self._factors.most):
            return self
        if self._twin is self:
            self._twin = copy.copy(self)
            self._twin._long = False
        return self._twin

    def run(
        self, tokens: mx.array, entries: list[Any] | None, hidden: Sequence[str] = ()
    ) -> Scores:
        if self._factors is not None:
            self._factors.long = self._long
        return super().run(tokens, entries, hidden)

    def cache_nbytes(self, source: int, positions: int) -> int:
        always, per_token = self._cache_sizes
        # Buffers grow in steps.
        held = -(-min(positions, self.max_length or positions) // STEP) * STEP
        return always + sum(n * min(held, most or held) for most, n in per_token.items())

    @cached_property
    def _cache_sizes(self) -> tuple[int, Counter[int | None]]:
        """The bytes of a sequence's recurrent state, and the bytes per token of its KV caches. The
        latter are summed over caches with the same limit, and their key is this number of tokens,
        or None."""
        always, per_token = 0, Counter[int | None]()
        for cache in leaves(self._begun_caches()):
            keys = getattr(cache, "keys", None)
            if keys is None:
                always += int(cache.nbytes)
            else:
                positions = (keys[0] if isinstance(keys, tuple) else keys).shape[-2]
                most = None
                if isinstance(cache, RotatingKVCache):
                    most = cache.max_size + DROP
                elif isinstance(cache, ChunkedKVCache):
                    most = cache.chunk_size + STEP
                per_token[most] += int(cache.nbytes) // positions
        return always, per_token

    def _begun_caches(self) -> list[Any]:
        """Return the caches of a sequence of one token. Nothing is computed."""
        caches = self._make_caches()
        self.network(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        return caches

    @cached_property
    def holds_scores(self) -> bool:
        if self._quantizes_cache:  # `attend_in_parts` computes a few rows at a time
            return False
        return on_cpu() or not head_sizes(self._begun_caches()) <= PROMPT_SIZES

    def prefill_nbytes(self, prompt: int, step: int) -> int:
        """Return the bytes of one layer's attention scores, or 0 if they are not held in memory."""
        args: Any = vars(getattr(self.network, "args", self))
        heads = text_config(args).get("num_attention_heads")
        if not isinstance(heads, int):
            return 0
        row_nbytes = heads * prompt * self.state_dtype.size
        if self._quantizes_cache:
            return min(step * row_nbytes, max(row_nbytes, SCORES_NBYTES))
        # A GPU holds the scores and their softmax.
        return (1 if on_cpu() else 2) * step * row_nbytes if self.holds_scores else 0

    @cached_property
    def rows_agree(self) -> bool:
        return rows_agree(self, self._opened)

    @cached_property
    def exact(self) -> ExactPasses:
        replace_in(self.network)
        divide_recurrences(self.network)
        return try_exact(self._opened, self.vocabulary)

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def untried(self) -> DecoderOnlyContext:
        """Open a context of one sequence before any trial of the model. Nothing is computed."""
        return DecoderOnlyContext(self, self._batched_caches, 1)

    def _opened(self, count: int = 1) -> DecoderOnlyContext:
        return DecoderOnlyContext(self, self._makers, count, self._recurrences)

    def caution(self, prompt_tokens: int) -> str:
        return ""

    @property
    def why_not_batched(self) -> str:
        return self._batch_trial[1]

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        for prompt in prompts:
            check_prompt(prompt, self.vocabulary, self.max_length)
        if len(prompts) > 1 and self.why_not_batched:
            raise OptionError(
                f"{family_of(self.network)} models decode one sequence at a time: "
                f"{self.why_not_batched}"
            )
        context = self._opened(len(prompts))
        # The trial runs only if sequences of different lengths share a pass.
        context.rows.mask_axes = lambda: self._batch_trial[0]
        context.restore(cached)
        return context

    @cached_property
    def _batch_trial(self) -> tuple[int | None, str]:
        """The number of axes of masks in batches, or why the model cannot decode batches."""
        states = DecoderOnlyContext(self, self._makers, 1).states
        single = sorted({type(c).__name__ for c in states if type(c) is not ArraysCache})
        if self._misfit:
            return None, self._misfit
        if single:
            return None, f"its caches of type {' and '.join(single)} hold one sequence"
        return try_batches(self, self._opened)

    @cached_property
    def _recurrences(self) -> Recurrences | None:
        return try_recurrences(self, self._makers)

    @cached_property
    def _makers(self) -> list[MakeCache]:
        """For each cache of the model, the function that makes the cache that is used. Whether
        passes are absorbed is decided before, so that all prefills are alike."""
        absorb(self, self.untried)
        return list(map(copier, self._make_caches())) if self._misfit else self._batched_caches

    @cached_property
    def _misfit(self) -> str:
        """The reason why the model cannot use batched caches, in one line; "" if it can."""
        try:
            with self.lazily():
                self.untried().advance(mx.zeros((1, 2), dtype=mx.int32))
        except Exception as problem:
            # Some models read attributes that only mlx-lm's caches have.
            return f"it fails with caches of several sequences ({first_line(problem)})"
        return ""
