"""A target that ranks share. Rank 0 runs the whole program. Its contexts send each call as an order
to the other ranks, which make the same call on their part of the target. Orders travel as arrays of
a fixed size that are added up over all ranks: rank 0 adds the orders, and the other ranks add
zeros. Every rank must therefore enter the same sums in the same order."""

import itertools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import mlx.core as mx

from ...errors import DecodingError, OptionError
from ...types import FINAL, Cached, Context, Reusable, Scores
from ..base import Base
from ..exact import ExactPasses

SIZE = 256
"""Length of the first array of a message. A network takes as long for it as for one number. Longer
messages, mostly with prompts, have a second array, whose size the first one states."""
OPERATIONS = ("open", "advance", "rewind", "evaluate", "merge", "keep", "close", "end")
"""The operations of orders: opening or closing a context, methods of `types.Context`, and the end
of all ranks. Messages have their numbers in this list."""
Order = tuple[str, int, tuple[int, ...]]
"""An operation, the number of the context, and the arguments."""
Total = Callable[[mx.array], mx.array]
"""A function that adds up an array over all ranks, lazily."""


@dataclass(frozen=True)
class OrderMessage:
    """Orders that all ranks received, and their encoding, (length or more,) int32."""

    orders: tuple[Order, ...]
    array: mx.array
    length: int

    def tokens(self, batch: int, rows: int) -> mx.array:
        """Return the tokens of the last order, (batch, rows) int32."""
        first = self.length - batch * rows
        return self.array[first : self.length].reshape(batch, rows)


def receive(total: Total) -> OrderMessage:
    """Wait for the next orders of rank 0."""
    array = _enter(total, mx.zeros(SIZE, dtype=mx.int32))
    numbers: list[int] = array.tolist()  # type: ignore[assignment]
    length = numbers[0]
    if length > SIZE:
        more = mx.zeros(-(-length // SIZE) * SIZE - SIZE, dtype=mx.int32)
        array = mx.concatenate([array, _enter(total, more)])
        numbers = array.tolist()  # type: ignore[assignment]
    orders, place = list[Order](), 1
    while place < length:
        operation, context, count = numbers[place : place + 3]
        place += 3 + count
        orders.append((OPERATIONS[operation], context, tuple(numbers[place - count : place])))
    return OrderMessage(tuple(orders), array, length)


def _enter(total: Total, array: mx.array) -> mx.array:
    entered = total(array)
    mx.async_eval(entered)
    return entered


def follow(model: Base, total: Total) -> int:
    """Execute rank 0's orders on this rank's part of the target, until the end. Return the exit
    code of all ranks."""
    contexts: dict[int, Context] = {}
    while True:
        message = receive(total)
        for operation, number, arguments in message.orders:
            if operation == "open":
                count, *rest = arguments
                ends = list(itertools.accumulate(rest[:count], initial=count))
                prompts = [rest[begin:end] for begin, end in itertools.pairwise(ends)]
                contexts[number] = model.open_batch(prompts)
            elif operation == "close":  # a context that has joined another is already gone
                contexts.pop(number, None)
            elif operation == "advance":
                batch, rows, proposed = arguments[:3]
                run_pass(contexts[number], message.tokens(batch, rows), proposed, ())
            elif operation == "evaluate":
                contexts[number].evaluate()
            elif operation == "merge":
                contexts[number].merge(contexts.pop(arguments[0]))
            elif operation == "rewind":
                contexts[number].rewind(arguments)
            elif operation == "keep":
                contexts[number].keep(arguments)
            else:
                return arguments[0]


def run_pass(context: Context, tokens: mx.array, proposed: int, hidden: Sequence[str]) -> Scores:
    """Submit the pass that a message orders, up to the last sum over all ranks."""
    scores = context.advance(tokens, proposed, hidden if FINAL in hidden else (*hidden, FINAL))
    mx.async_eval(scores.hidden[FINAL])
    return scores


class Leader:
    """Rank 0's sender of orders. Orders that can wait are sent with the next pass.

    Attributes:
        lost: Whether an error interrupted a pass. All ranks then have to be started again.
    """

    def __init__(self, total: Total) -> None:
        self._total = total
        self._queued: deque[Order] = deque()
        self.numbers = itertools.count()
        self._inside = False
        self._interrupted = False
        self.lost = False
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)

    def queue(self, order: Order) -> None:
        self._queued.append(order)

    def send(self, order: Order, tokens: mx.array | None = None) -> OrderMessage:
        """Send an order after the waiting orders, without waiting. Call this within `whole`, and
        make the same call on this rank's part of the target immediately afterwards. `tokens`,
        (batch, rows) int32, are added to the arguments; they need not be computed yet."""
        orders = [*(self._queued.popleft() for _ in range(len(self._queued))), order]
        more = 0 if tokens is None else tokens.size
        numbers: list[int] = [0]
        for operation, context, arguments in orders:
            numbers += [OPERATIONS.index(operation), context, len(arguments), *arguments]
        length = numbers[0] = len(numbers) + more
        numbers[-len(order[2]) - 1] += more
        parts = [mx.array(numbers, dtype=mx.int32)]
        if tokens is not None:
            parts.append(tokens.astype(mx.int32).reshape(-1))
        parts.append(mx.zeros(-length % SIZE, dtype=mx.int32))
        array = mx.concatenate(parts)
        received = _enter(self._total, array[:SIZE])
        if length > SIZE:
            received = mx.concatenate([received, _enter(self._total, array[SIZE:])])
        return OrderMessage(tuple(orders), received, length)

    def end(self, code: int) -> None:
        """Make all other ranks exit with this code, unless an error interrupted a pass."""
        if not self.lost:
            mx.eval(self.send(("end", 0, (code,))).array)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Delay an interrupt until an order was sent and executed on this rank. Raises
        DecodingError if an error has interrupted an earlier pass."""
        if self.lost:
            raise DecodingError("the ranks have lost step: start again")
        self._inside = self.lost = True
        try:
            yield
            self.lost = False
        finally:
            self._inside = False
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._inside:
            raise KeyboardInterrupt
        self._interrupted = True


class LedModel:
    """A `base.Base` whose contexts send orders to the other ranks. `rows_agree` and
    `why_not_batched` are results of trials that all ranks have run. All other attributes are the
    attributes of the model."""

    def __init__(self, model: Base, leader: Leader, rows_agree: bool, why_not_batched: str) -> None:
        self._model = model
        self._leader = leader
        self.rows_agree, self.why_not_batched = rows_agree, why_not_batched

    def reaching(self, length: int) -> Base:
        """Return this model: all ranks use the rotary factors for long sequences."""
        return cast(Base, self)

    def __getattr__(self, name: str) -> Any:
        if name == "network":
            raise OptionError(
                "this needs all of the target's weights in one place: leave out distributed"
            )
        return getattr(self._model, name)

    @property
    def lost(self) -> bool:
        return self._leader.lost

    exact = ExactPasses(0, 0, "several machines share the model")

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        context = self._model.open_batch(prompts)
        number, lengths = next(self._leader.numbers), map(len, prompts)
        numbers = (len(prompts), *lengths, *itertools.chain.from_iterable(prompts))
        self._leader.queue(("open", number, tuple(map(int, numbers))))
        return LedContext(self._leader, number, context, self._model.capture)


class LedContext:
    """A `types.Context` that all ranks hold under the same number. `capture` is the model's method,
    which raises for hidden states that the model lacks."""

    def __init__(
        self, leader: Leader, number: int, context: Context, capture: Callable[[str], Any]
    ) -> None:
        self._leader = leader
        self._number = number
        self._context = context
        self._capture = capture
        weakref.finalize(self, leader.queue, ("close", number, ())).atexit = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._context.lengths

    checkpoints = False

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        batch, rows = tokens.shape
        for name in hidden:
            self._capture(name)  # may raise, which must happen before an order is sent
        with self._leader.whole():
            order = ("advance", self._number, (batch, rows, proposed))
            received = self._leader.send(order, tokens).tokens(batch, rows)
            return run_pass(self._context, received, proposed, hidden)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        self._context.rewind(lengths)
        self._leader.queue(("rewind", self._number, lengths))

    def evaluate(self) -> None:
        with self._leader.whole():
            self._leader.send(("evaluate", self._number, ()))
            self._context.evaluate()

    def merge(self, joining: Context) -> None:
        assert isinstance(joining, LedContext)
        self._context.merge(joining._context)
        self._leader.queue(("merge", self._number, (joining._number,)))

    def keep(self, rows: Sequence[int]) -> None:
        self._context.keep(rows)
        self._leader.queue(("keep", self._number, tuple(rows)))

    def snapshot(self, sequence: int) -> Reusable:
        return Reusable()
