"""Target passes in which the bits of a row do not depend on the number of rows.

A matrix product adds in one order for a single row, and in another order for several rows.
Attention over a long cache splits the keys into parts, whose number depends on the number of rows.
Plain and speculative decoding can therefore choose different tokens in half precision, if two
tokens are almost equally likely.

An exact pass pads products of fewer than `least` rows with zeros. It computes attention row by row,
and also recurrences that have another kernel for a single row. A trial of the whole model at load
finds `least` and the most rows that a pass may have."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import first_line
from ..types import Context
from .patches import PRODUCTS

FIRST_TOKENS, COMPARED_TOKENS = 6, 14
"""A trial caches FIRST_TOKENS tokens, and compares the rows of COMPARED_TOKENS more."""
INPUTS = 3
"""Number of random inputs of a trial. Two kernels differ in few numbers."""


@dataclass(frozen=True)
class ExactPasses:
    """How the rows of a model's passes get equal bits.

    Attributes:
        least: The number of rows to which products are padded. 1 pads nothing.
        most: The most rows of a pass in decoding.
        why_not: Why no passes are exact, as the end of an error message; "" if they are."""

    least: int
    most: int
    why_not: str = ""

    @property
    def most_drafted(self) -> int:
        return self.most - 1


WAYS = (ExactPasses(1, 5), ExactPasses(1, 3), ExactPasses(2, 5), ExactPasses(4, 5))
"""A trial tries these from the cheapest to the dearest. Metal's kernels add in one order for 2 to 5
rows. On M1 and M2, one row of quantized weights has this order too. MKL has one kernel for 1 to 3
rows, and another for more rows."""


_least: ContextVar[int] = ContextVar("least", default=0)
"""`ExactPasses.least` of the pass that a thread is building, or 0 if the pass is not exact."""


def rows_stand_alone() -> bool:
    """Return whether this thread is building an exact pass. Attention and recurrences are computed
    row by row in it."""
    return _least.get() > 0


@contextmanager
def exact_pass(least: int) -> Iterator[None]:
    """Build exact passes in a block. least: See ExactPasses; 0 builds passes that are not exact."""
    before = _least.set(least)
    try:
        yield
    finally:
        _least.reset(before)


def _pad(place: int, plain: Callable[..., mx.array], *args: Any, **kwargs: Any) -> mx.array:
    """Compute a matrix product, and pad its rows in an exact pass.

    Products with one column are left alone: they add in one order for any number of rows.

    Args:
        place: The number of the argument with the rows, (..., rows, inputs). The next argument has
            the weights.
        plain: The product."""
    (left, right), least = args[place : place + 2], _least.get()
    rows = left.shape[-2] if left.ndim > 1 else least
    if rows >= least or right.ndim == 1 or right.shape[-1] == 1:
        return plain(*args, **kwargs)
    more = [(0, 0)] * (left.ndim - 2) + [(0, least - rows), (0, 0)]
    padded = (*args[:place], mx.pad(left, more), *args[place + 1 :])
    return plain(*padded, **kwargs)[..., :rows, :]


class _Exact:
    """The result of `exactly`."""

    def __init__(self, context: Context, least: int) -> None:
        self._context, self._least = context, least

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._context, name)
        return exact_pass(self._least)(part) if callable(part) else part


def exactly(context: Context, least: int) -> Any:
    """Return a types.Context of the same sequence whose passes are exact. All its methods may run a
    pass: `rewind` repeats recurrences, and `evaluate` may run an encoder. least: See ExactPasses.
    """
    return _Exact(context, least)


def try_exact(open_: Callable[[], Context], vocabulary: int) -> ExactPasses:
    """Return the first of WAYS in which passes over several rows have the logits of passes over one
    row. Bits are compared, also after some of the rows were rewound.

    Args:
        open_: Opens a context of one sequence.
        vocabulary: Number of token ids."""
    why_not, first, second = "", partial(_pad, 0), partial(_pad, 1)
    for way in WAYS:
        if way.least > 1:
            PRODUCTS.wrap(mx.array, __matmul__=first)
            PRODUCTS.wrap(mx, matmul=first, quantized_matmul=first, addmm=second)
        try:
            if all(_equal(open_, vocabulary, way, seed) for seed in range(INPUTS)):
                return way
            why_not = "in a trial its rows had other bits in passes over several rows"
        except Exception as problem:
            why_not = f"a trial pass failed ({first_line(problem)})"
    return ExactPasses(0, 0, why_not)


def _equal(open_: Callable[[], Context], vocabulary: int, way: ExactPasses, seed: int) -> bool:
    """Return whether single rows have the bits of rows in passes of up to `way.most` rows."""
    key, count = mx.random.key(seed), FIRST_TOKENS + COMPARED_TOKENS
    tokens = mx.random.randint(0, vocabulary, (1, count), mx.int32, key=key)
    sizes = sorted(range(1, way.most + 1), key=lambda size: size % 2)  # 2, 4, 1, 3, 5

    def passes(sizes: Sequence[int]) -> Iterator[tuple[int, mx.array]]:
        """Yield the number of compared tokens before each pass, and the logits of its rows."""
        context, at, number = exactly(open_(), way.least), FIRST_TOKENS, 0
        context.advance(tokens[:, :FIRST_TOKENS])
        while at < count:
            part = tokens[:, at : at + sizes[number % len(sizes)]]
            yield at - FIRST_TOKENS, context.advance(part, part.shape[1] - 1).logits[0]
            # Reject up to two tokens, which the next pass computes again.
            at, number = at + max(1, part.shape[1] - 2), number + 1
            context.rewind((at,))

    alone = mx.concatenate([logits for _, logits in passes([1])])
    return all(mx.array_equal(alone[at : at + len(rows)], rows) for at, rows in passes(sizes))
