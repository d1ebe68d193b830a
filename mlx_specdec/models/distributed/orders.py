"""Orders of rank 0 to the others: one array of a fixed size for each pass of the target.

Every rank enters the same sums in the same order, and all but rank 0 add zeros. Rank 0 alone
decides what comes next, and how large it is, so that ranks cannot disagree. Tokens go along without
having been read on rank 0. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import mlx.core as mx

SIZE = 256
"""Numbers of the array. A round of one sequence needs a tenth of them; a network takes as long for
this many as for one. What is longer, prompts above all, comes in a second one whose size the first
one says."""
HEAD = 3
"""Numbers of an order before its own: what it is, of which context, and how many follow."""


class Op(IntEnum):
    """What to do with a context: a method of interfaces.Context, or else OPEN, CLOSE, SUM, which
    times the network, and END, the end of all ranks."""

    OPEN = auto()
    ADVANCE = auto()
    REWIND = auto()
    EVALUATE = auto()
    JOIN = auto()
    FILTER = auto()
    CLOSE = auto()
    SUM = auto()
    END = auto()


@dataclass(frozen=True)
class Order:
    """One thing to do. numbers: its arguments."""

    op: Op
    context: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Message:
    """Orders as all ranks have them. whole: the array that they came in, (n,) int32, the first
    `length` of which are used."""

    orders: tuple[Order, ...]
    whole: mx.array
    length: int

    def tokens(self, batch: int, rows: int) -> mx.array:
        """(batch, rows) int32, the tokens that came with the last order."""
        first = self.length - batch * rows
        return self.whole[first : self.length].reshape(batch, rows)


class Channel:
    """A rank's end of the line. total: adds up an array over all ranks, lazily."""

    def __init__(self, total: Callable[[mx.array], mx.array]) -> None:
        self.total = total

    def send(self, orders: Sequence[Order], tokens: mx.array | None = None) -> Message:
        """Send orders to all others, without waiting for them. tokens: (batch, rows) int32, the
        last numbers of the last order; they may not be computed yet."""
        more = 0 if tokens is None else tokens.size
        numbers: list[int] = [0]
        for order in orders:
            count = len(order.numbers) + (more if order is orders[-1] else 0)
            numbers += [order.op, order.context, count, *order.numbers]
        length = numbers[0] = len(numbers) + more
        parts = [mx.array(numbers, dtype=mx.int32)]
        if tokens is not None:
            parts.append(tokens.astype(mx.int32).reshape(-1))
        parts.append(mx.zeros(-length % SIZE, dtype=mx.int32))
        whole = mx.concatenate(parts)
        first = self._enter(whole[:SIZE])
        if length > SIZE:
            first = mx.concatenate([first, self._enter(whole[SIZE:])])
        return Message(tuple(orders), first, length)

    def receive(self) -> Message:
        """Wait for the orders of rank 0."""
        whole = self._enter(mx.zeros(SIZE, dtype=mx.int32))
        numbers: list[int] = whole.tolist()  # type: ignore[assignment]
        length = numbers[0]
        if length > SIZE:
            more = mx.zeros(-(-length // SIZE) * SIZE - SIZE, dtype=mx.int32)
            whole = mx.concatenate([whole, self._enter(more)])
            numbers = whole.tolist()  # type: ignore[assignment]
        return Message(tuple(_orders(numbers[1:length])), whole, length)

    def _enter(self, array: mx.array) -> mx.array:
        """The sum, submitted, so that no later one can come before it on any rank."""
        total = self.total(array)
        mx.async_eval(total)
        return total


def _orders(numbers: Sequence[int]) -> Iterator[Order]:
    place = 0
    while place < len(numbers):
        op, context, count = numbers[place : place + HEAD]
        place += HEAD + count
        yield Order(Op(op), context, tuple(numbers[place - count : place]))
