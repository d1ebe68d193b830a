"""Any decoder-only model that mlx-lm implements, as a Model with rewindable contexts.

Knows mlx-lm's classes and caches. Knows nothing of files, text, proposals or rules. Importing this
module imports mlx-lm and with it transformers (about a second): import it when it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..cache_settings import CacheSettings
from ..contracts import Progress, Scores
from ..errors import OptionError, PromptError, RewindError
from .base import BatchPass
from .cache_kinds import cache_maker
from .rewinding import RewindableCache, evaluate

PREFILL_STEP = 512
"""Prompt tokens in one pass: what mlx-lm uses; more only costs memory."""


class _Tap:
    """Keeps what a module returns, for one call after `arm`, or returns what `give` was given.

    The instance gets a subclass of its own class, so its parameters, its name in the model and
    whatever else is said about it stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._armed = False
        self._kept: Any = None
        self._given: mx.array | None = None
        plain = type(module)

        def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                given, self._given = self._given, None
                return given
            result = plain.__call__(inner, *args, **kwargs)
            if self._armed:
                self._kept, self._armed = result, False
            return result

        module.__class__ = type(plain.__name__, (plain,), {"__call__": call})

    def arm(self) -> None:
        """The next result is kept."""
        self._armed, self._kept = True, None

    def give(self, result: mx.array) -> None:
        """The next call returns this and computes nothing."""
        self._given = result

    def take(self) -> Any:
        """The kept result, which is then let go; None where the module was not called."""
        kept, self._kept, self._armed = self._kept, None, False
        return kept


def _inner(model: nn.Module) -> nn.Module:
    """The module whose result the output head is given, through any multimodal wrapper."""
    outer = _innermost(model)
    children = (getattr(outer, name, None) for name in ("model", "transformer", "backbone"))
    return _innermost(next((c for c in children if isinstance(c, nn.Module)), outer))


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "language_model", None), nn.Module):
        module = inner
    return module


class DecoderOnlyModel:
    """A Model over an mlx-lm model.

    model: the loaded module, called as `model(tokens, cache=entries)`; kept as `network`.
    max_length: longest committed text in tokens, or None. caches: raises OptionError for kinds that
    the model cannot use.
    """

    def __init__(
        self,
        model: nn.Module,
        max_length: int | None = None,
        caches: CacheSettings | None = None,
    ) -> None:
        self.network = model
        self._max_length = max_length
        self._make_caches = cache_maker(model, caches or CacheSettings())
        self._tap: _Tap | None = None
        self._state: tuple[int, mx.Dtype] | None = None
        # Shapes are known as soon as the graph is built; nothing is computed here.
        probe = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
        self._vocabulary: int = probe.shape[-1]

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

    @property
    def width(self) -> int:
        """Width of the hidden state "final". Raises OptionError where a model has no such state."""
        return self._seen_state()[0]

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden state "final". Raises OptionError as `width` does."""
        return self._seen_state()[1]

    def head(self, states: mx.array) -> mx.array:
        """The model's own output head: (batch, m, width), as "final" is -> logits.

        Raises OptionError as `width` does.
        """
        # Heads are scaled, soft-capped or tied: only the model's own call knows how.
        self._final().give(states)
        logits: mx.array = self.network(mx.zeros(states.shape[:2], dtype=mx.int32))
        return logits

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The prompt itself."""
        return list(prompt)

    def open(self, prompt: Sequence[int], progress: Progress | None = None) -> DecoderOnlyContext:
        """A context that has seen all of `prompt` but its last token, in steps of PREFILL_STEP.

        `progress` counts those tokens. Raises PromptError for a prompt that is empty, longer than
        `max_length`, or that holds an id outside of the vocabulary.
        """
        self._check_prompt(prompt)
        context = DecoderOnlyContext(self, self._make_caches())
        context.prefill(prompt[:-1], progress)
        return context

    def open_batch(self, prompts: Sequence[Sequence[int]]) -> BatchPass:
        """A pass over several texts at once, their prompts included; as base.Base says."""
        for prompt in prompts:
            self._check_prompt(prompt)
        entries = self._make_caches()
        return lambda tokens: self.network(tokens, cache=entries)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise PromptError("the prompt is empty: give at least one token")
        if self._max_length is not None and len(prompt) > self._max_length:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the model takes {self._max_length}: "
                "shorten it"
            )
        # mlx reads past the embedding table without a word.
        strange = next((t for t in prompt if not 0 <= t < self._vocabulary), None)
        if strange is not None:
            raise PromptError(
                f"token id {strange} of the prompt is not among the model's {self._vocabulary}: "
                "the tokenizer belongs to another model"
            )

    def run(self, tokens: mx.array, entries: list[Any] | None, tap: _Tap | None = None) -> Scores:
        """One pass over `tokens` (batch, m) int32, which `entries`, the caches, remember; None:
        over whole texts, of which nothing is remembered."""
        if tap is None:
            return Scores(self.network(tokens, cache=entries))
        tap.arm()
        logits = self.network(tokens, cache=entries)
        return Scores(logits, {"final": tap.take()})

    def tap(self, names: Sequence[str]) -> _Tap | None:
        """What `run` needs to return these hidden states; the model is prepared on the first call.

        Raises ValueError for a name other than "final", OptionError where a model has none.
        """
        unknown = [name for name in names if name != "final"]
        if unknown:
            raise ValueError(f"unknown hidden state {unknown[0]!r}: this model has 'final'")
        return self._final() if names else None

    def _final(self) -> _Tap:
        if self._tap is None:
            tap = _Tap(_inner(self.network))
            tap.arm()
            self.network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(self.network))
            seen = tap.take()
            # Some models keep the head inside: what comes out of them are logits.
            if not isinstance(seen, mx.array) or seen.shape[-1] == self._vocabulary:
                kind = type(self.network).__module__.rpartition(".")[2]
                raise OptionError(f"models of type {kind} do not show the input of their head")
            self._tap, self._state = tap, (seen.shape[-1], seen.dtype)
        return self._tap

    def _seen_state(self) -> tuple[int, mx.Dtype]:
        """Width and type of "final"."""
        if self._state is None:
            self._final()
        return self._state or (0, mx.float32)


class DecoderOnlyContext:
    """One sequence in one mlx-lm model.

    model: whose passes these are. entries: empty caches, one a layer, owned from here on.
    """

    def __init__(self, model: DecoderOnlyModel, entries: list[Any]) -> None:
        self._model = model
        self._cache = RewindableCache(entries)
        self._final = 0
        # Tokens since `_since` that a replay may need.
        self._undecided: list[mx.array] = []
        self._since = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen, rewound ones not counted."""
        return (self._cache.length,)

    @property
    def replays(self) -> bool:
        """Whether a rewind into a pass of several tokens costs another pass over the kept ones."""
        return self._cache.replays

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """See `tokens` (1, m) int32, the last `proposed` of which may be taken back.

        Raises ValueError for more than one sequence, no tokens, a `proposed` outside of 0 .. m, or
        a hidden state that is not "final".
        """
        rows = _rows(tokens, proposed)
        tap = self._model.tap(taps) if taps else None
        start = self._cache.length
        self._cache.before_pass(rows, proposed)
        scores = self._model.run(tokens, self._cache.entries, tap)
        if proposed < rows:
            self._final = start + rows - proposed
            self._undecided, self._since = [], start
        elif not self._undecided:
            self._since = start
        if proposed and self._cache.replays:
            self._undecided.append(tokens)
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Forget all but the first `lengths` tokens; what stays is final.

        Where the caches can only go further back, the kept tokens are fed again, without waiting
        for it. Raises RewindError for lengths outside of what is final and what was seen, and where
        a cache does not hold the right number of tokens afterwards.
        """
        if len(lengths) != 1:
            raise RewindError(f"this context holds one sequence and {len(lengths)} lengths came")
        length, seen = lengths[0], self._cache.length
        if not self._final <= length <= seen:
            raise RewindError(
                f"cannot go to {length} tokens: {seen} were seen and {self._final} are final"
            )
        reached = self._cache.rewind(length)
        if reached < length:
            tokens = mx.concatenate(self._undecided, axis=1)
            kept = tokens[:, reached - self._since : length - self._since]
            self._cache.before_pass(length - reached, 0)
            self._model.run(kept, self._cache.entries)
            # The device works on it while the host builds the next proposal; without logits.
            mx.async_eval(self._cache.state)
        self._final, self._undecided, self._since = length, [], length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """See a long text in steps, computing each before the next one is built."""
        total = len(tokens)
        if progress is not None:
            progress(0, total)
        for start in range(0, total, PREFILL_STEP):
            step = tokens[start : start + PREFILL_STEP]
            self.advance(mx.array([step], dtype=mx.int32))
            evaluate(self._cache)
            if progress is not None:
                progress(start + len(step), total)


def _rows(tokens: mx.array, proposed: int) -> int:
    if tokens.ndim != 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"a context holds one sequence, tokens of shape (1, m); these have {tokens.shape}"
        )
    rows = tokens.shape[1]
    if rows < 1 or not 0 <= proposed <= rows:
        raise ValueError(f"{proposed} proposed of {rows} tokens: need 0 <= proposed <= m, m >= 1")
    return rows
