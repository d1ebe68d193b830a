"""Target passes in which the result of a row does not depend on the other rows, bit for bit.

A GPU rounds a row differently in passes over one row and over several rows. Matrix products add in
another order. Attention over a long cache splits the keys into parts, and the split depends on the
number of rows. In half precision, plain and speculative decoding can then choose different tokens
if two tokens are almost equally likely. An exact context therefore pads a single row to two rows,
and computes the attention of each row in a separate call."""

import threading
from collections.abc import Sequence

import mlx.core as mx

from ..types import Context, Reusable, Scores


class _Passes(threading.local):
    exact = False


_passes = _Passes()


def rows_attend_alone() -> bool:
    """Return whether the pass that this thread is building belongs to an exact context."""
    return _passes.exact


class ExactContext:
    """A types.Context of one sequence whose passes have at least two rows.

    Args:
        context: The context that runs the passes."""

    checkpoints = False

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._context.lengths

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        """Run a pass as types.Context says. A single token gets a second one as padding, which
        is rewound at once."""
        padded = tokens.shape[1] == 1
        if padded:
            tokens = mx.pad(tokens, [(0, 0), (0, 1)])
        _passes.exact = True
        try:
            scores = self._context.advance(tokens, proposed + padded, hidden)
        finally:
            _passes.exact = False
        if not padded:
            return scores
        [length] = self._context.lengths
        self._context.rewind((length - 1,))
        return scores.of(0, 1)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        self._context.rewind(lengths)

    def evaluate(self) -> None:
        self._context.evaluate()

    def merge(self, joining: Context) -> None:
        raise TypeError("an exact context holds one sequence")

    def keep(self, rows: Sequence[int]) -> None:
        """Do nothing: the context holds one sequence."""

    def snapshot(self, sequence: int) -> Reusable:
        """Return nothing: cached tokens were computed in passes of other sizes."""
        return Reusable()
