"""One sequence in a model of mlx-lm's whose caches are windows or recurrent state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..contracts import Context, Scores
from ..kept import Memory, Whole
from .base import check_pass, check_rewind
from .rewinding import RewindableCache, evaluate

if TYPE_CHECKING:
    from .decoder_only import DecoderOnlyModel


class ReplayingContext:
    """One sequence in a model whose caches are windows or recurrent state.

    model: whose passes these are. entries: caches of `length` tokens, one a layer, owned from here
    on.
    """

    def __init__(self, model: DecoderOnlyModel, entries: Any, length: int = 0) -> None:
        self._model = model
        self._cache = RewindableCache(entries, length)
        self._final = length
        # Tokens since `_since` that a replay may need.
        self._undecided: list[mx.array] = []
        self._since = length

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

        Raises ValueError for more than one sequence, no tokens, or a `proposed` outside of 0 .. m.
        """
        rows = check_pass(tokens, proposed, 1)
        for name in taps:
            self._model.tap(name)  # refused before anything is seen
        start = self._cache.length
        self._cache.before_pass(rows, proposed)
        scores = self._model.run(tokens, self._cache.entries, taps)
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
        check_rewind(lengths, (self._final,), self.lengths)
        [length] = lengths
        reached = self._cache.rewind(length)
        if reached < length:
            tokens = mx.concatenate(self._undecided, axis=1)
            kept = tokens[:, reached - self._since : length - self._since]
            self._cache.before_pass(length - reached, 0)
            self._model.run(kept, self._cache.entries)
            # The device works on it while the host builds the next proposal; without logits.
            mx.async_eval(self._cache.state)
        self._final, self._undecided, self._since = length, [], length

    def evaluate(self) -> None:
        """As contracts.Context says; gives the scratch memory of the passes back."""
        evaluate(self._cache)

    def join(self, other: Context) -> None:
        """Raises TypeError: what one sequence needs alone has no place for another."""
        raise TypeError("a context of one sequence: see DecoderOnlyModel.open_batch")

    def filter(self, keep: Sequence[int]) -> None:
        """Nothing to do: it holds one sequence."""

    def memory(self, sequence: int) -> Memory:
        """As contracts.Context says: all that was seen, where none of it may be taken back."""
        length = self._cache.length
        if not length or length != self._final:
            return Memory()
        return Memory(whole=Whole(length, *_snapshot(self._cache.entries)))


def _snapshot(entries: list[Any]) -> tuple[list[Any], tuple[mx.array, ...]]:
    """A copy of mlx-lm's caches, lazily, and all arrays in it. `copy.deepcopy` shares memory until
    either side is written to; a view of something larger gets memory of its own, so that the copy
    takes what its arrays say."""
    taken: dict[int, tuple[mx.array, mx.array]] = {}
    copied = _with_own_arrays(copy.deepcopy(entries), taken)
    return copied, tuple(own for _, own in taken.values())


def _with_own_arrays(part: Any, taken: dict[int, tuple[mx.array, mx.array]]) -> Any:
    """The same thing; arrays that caches share stay shared. taken: by the identity of the array
    before, which is kept so that no other one gets it."""
    if isinstance(part, mx.array):
        return taken.setdefault(id(part), (part, mx.contiguous(part)))[1]
    if isinstance(part, list):
        part[:] = [_with_own_arrays(each, taken) for each in part]
    elif isinstance(part, tuple):
        return tuple(_with_own_arrays(each, taken) for each in part)
    elif isinstance(part, dict):
        part.update({name: _with_own_arrays(each, taken) for name, each in part.items()})
    elif hasattr(part, "__dict__"):
        for name, each in vars(part).items():
            setattr(part, name, _with_own_arrays(each, taken))
    return part
