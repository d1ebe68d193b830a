"""Target passes in which a row has the same bits whatever else the pass contains.

A GPU sums the products of a single row in one order and those of several rows in another, and its
attention over a long cache divides the keys by the number of rows. In half precision the outputs of
plain and of speculative decoding then part at ties. An exact context never runs a single row, and
lets each row attend in a call of its own."""

import threading
from collections.abc import Sequence

import mlx.core as mx

from ..interfaces import Context, Scores
from ..interfaces.results import Reusable


class _Passes(threading.local):
    exact = False


_passes = _Passes()


def rows_attend_alone() -> bool:
    """Return whether the pass that this thread is building belongs to an exact context."""
    return _passes.exact


class ExactContext:
    """interfaces.Context of one sequence: another context, with at least two rows in each pass.

    Args:
        context: The context to use. It must be able to drop its newest token without a replay."""

    replays = checkpoints = False

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._context.lengths

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """See Context. A single token is padded to two, and the padding is dropped at once."""
        padded = tokens.shape[1] == 1
        if padded:
            tokens = mx.pad(tokens, [(0, 0), (0, 1)])
        _passes.exact = True
        try:
            scores = self._context.advance(tokens, proposed + padded, taps)
        finally:
            _passes.exact = False
        if not padded:
            return scores
        [length] = self._context.lengths
        self._context.rewind((length - 1,))
        return scores.of(0, 1)

    def rewind(self, lengths: tuple[int, ...]) -> int:
        return self._context.rewind(lengths)

    def evaluate(self) -> None:
        self._context.evaluate()

    def join(self, other: Context) -> None:
        raise TypeError("an exact context holds one sequence")

    def filter(self, keep: Sequence[int]) -> None:
        """Do nothing: the context holds one sequence."""

    def reusable(self, sequence: int) -> Reusable:
        """Return nothing: cached tokens were computed in passes of other sizes."""
        return Reusable()
