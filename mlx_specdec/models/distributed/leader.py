"""A target that ranks share: rank 0 leads, and the others follow its orders. Rank 0 runs the whole
program over contexts that send each call to the others, which do the same with their part of the
target. An order is one array of a fixed size for each pass: every rank enters the same sums in the
same order, and all but rank 0 add zeros."""

import itertools
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, auto
from types import FrameType
from typing import Any, cast

import mlx.core as mx

from ...errors import DecodingError, OptionError
from ...interfaces import FINAL, Context, Scores
from ...interfaces.results import Cached, Reusable
from ..base import Base

SIZE = 256
"""Numbers of the array; a network takes as long for this many as for one. What is longer, prompts
above all, comes in a second one whose size the first one says."""
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
    """Orders as all ranks have them. whole: (length or more,) int32, as they came."""

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
        """Send orders without waiting. tokens: (batch, rows) int32, the last numbers of the last
        order; they may not be computed yet."""
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
        whole = self._enter(mx.zeros(SIZE, dtype=mx.int32))
        numbers: list[int] = whole.tolist()  # type: ignore[assignment]
        length = numbers[0]
        if length > SIZE:
            more = mx.zeros(-(-length // SIZE) * SIZE - SIZE, dtype=mx.int32)
            whole = mx.concatenate([whole, self._enter(more)])
            numbers = whole.tolist()  # type: ignore[assignment]
        return Message(tuple(_orders(numbers[1:length])), whole, length)

    def _enter(self, array: mx.array) -> mx.array:
        total = self.total(array)
        mx.async_eval(total)
        return total


def _orders(numbers: Sequence[int]) -> Iterator[Order]:
    place = 0
    while place < len(numbers):
        op, context, count = numbers[place : place + HEAD]
        place += HEAD + count
        yield Order(Op(op), context, tuple(numbers[place - count : place]))


class Follower:
    """The contexts of a rank that follows. model: this rank's part."""

    def __init__(self, model: Base) -> None:
        self._model = model
        self._contexts: dict[int, Context] = {}

    def do(self, order: Order, message: Message) -> None:
        if order.op is Op.OPEN:
            joins, count, *rest = order.numbers
            ends = list(itertools.accumulate(rest[:count], initial=count))
            prompts = [rest[begin:end] for begin, end in itertools.pairwise(ends)]
            opened = self._model.open_batch(prompts) if joins else self._model.open(prompts[0])
            self._contexts[order.context] = opened
        elif order.op is Op.CLOSE:  # one that has joined another is no more
            self._contexts.pop(order.context, None)
        elif order.op is Op.ADVANCE:
            batch, rows, proposed = order.numbers[:3]
            run_pass(self._contexts[order.context], message, batch, rows, proposed, ())
        elif order.op is Op.EVALUATE:
            self._contexts[order.context].evaluate()
        elif order.op is Op.JOIN:
            self._contexts[order.context].join(self._contexts.pop(order.numbers[0]))
        elif order.op is Op.REWIND:
            self._contexts[order.context].rewind(order.numbers)
        else:
            self._contexts[order.context].filter(order.numbers)


def follow(model: Base, channel: Channel) -> int:
    """Follow orders until the end; returns the code that all ranks exit with."""
    follower = Follower(model)
    while True:
        message = channel.receive()
        for order in message.orders:
            if order.op is Op.END:
                return order.numbers[0]
            if order.op is Op.SUM:
                time_sums(model, channel, *order.numbers)
            else:
                follower.do(order, message)


def run_pass(
    context: Context, message: Message, batch: int, rows: int, proposed: int, taps: Sequence[str]
) -> Scores:
    """Submit the pass that a message orders as far as ranks work on it together."""
    wanted = taps if FINAL in taps else (*taps, FINAL)
    scores = context.advance(message.tokens(batch, rows), proposed, wanted)
    mx.async_eval(scores.hidden[FINAL])
    return scores


def time_sums(model: Base, channel: Channel, rows: int, count: int) -> float:
    """Seconds of `count` sums of hidden states of `rows` tokens, one behind another. All ranks have
    to come."""
    states = mx.zeros((1, rows, model.width), dtype=model.state_dtype)
    mx.eval(channel.total(states))
    started = time.perf_counter()
    for _ in range(count):
        states = channel.total(states)
    mx.eval(states)
    return time.perf_counter() - started


class Leader:
    """Sends orders to the other ranks; what can wait goes along with the next pass. lost: a pass
    was left in its middle; all ranks then have to be started again."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
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

    def send(self, order: Order, tokens: mx.array | None = None) -> Message:
        """Send an order now. What the ranks do together has to follow at once, within `whole`."""
        orders = [self._queued.popleft() for _ in range(len(self._queued))]
        return self._channel.send([*orders, order], tokens)

    def time_sums(self, model: Base, rows: int, count: int) -> float:
        with self.whole():
            self.send(Order(Op.SUM, 0, (rows, count)))
            return time_sums(model, self._channel, rows, count)

    def end(self, code: int) -> None:
        """Have all others exit with this code, unless a pass was left in its middle."""
        if not self.lost:
            mx.eval(self.send(Order(Op.END, 0, (code,))).whole)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep an interrupt from dividing an order from this rank's part. Raises DecodingError
        where something else has."""
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


def led(model: Base, leader: Leader) -> Base:
    """Return the model as rank 0 uses it."""
    return cast(Base, LedModel(model, leader))


class LedModel:
    """base.Base: a model whose contexts lead, and the model itself in all else."""

    def __init__(self, model: Base, leader: Leader) -> None:
        self._model = model
        self._leader = leader

    def __getattr__(self, name: str) -> Any:
        if name == "network":
            raise OptionError(
                "this needs all of the target's weights in one place: leave out distributed"
            )
        return getattr(self._model, name)

    @property
    def lost(self) -> bool:
        return self._leader.lost

    why_not_exact = "several machines share the model"

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> Context:
        return self._led(self._model.open(prompt), [prompt], joins=False)

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        return self._led(self._model.open_batch(prompts), prompts, joins=True)

    def _led(self, context: Context, prompts: Sequence[Sequence[int]], *, joins: bool) -> Context:
        number, lengths = next(self._leader.numbers), map(len, prompts)
        numbers = (joins, len(prompts), *lengths, *itertools.chain.from_iterable(prompts))
        self._leader.queue(Order(Op.OPEN, number, tuple(map(int, numbers))))
        return LedContext(self._leader, number, context, getattr(self._model, "tap", None))


class LedContext:
    """interfaces.Context: sequences that all ranks know by a number. tap: TappedNetwork.tap."""

    def __init__(
        self, leader: Leader, number: int, context: Context, tap: Callable[[str], Any] | None
    ) -> None:
        self._leader = leader
        self._number = number
        self._context = context
        self._tap = tap
        weakref.finalize(self, leader.queue, Order(Op.CLOSE, number)).atexit = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._context.lengths

    checkpoints = False

    @property
    def replays(self) -> bool:
        return self._context.replays

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        batch, rows = tokens.shape
        if self._tap is not None:
            for name in taps:
                self._tap(name)  # refused before an order goes out
        with self._leader.whole():
            order = Order(Op.ADVANCE, self._number, (batch, rows, proposed))
            message = self._leader.send(order, tokens)
            return run_pass(self._context, message, batch, rows, proposed, taps)

    def rewind(self, lengths: tuple[int, ...]) -> int:
        order = Order(Op.REWIND, self._number, lengths)
        if not self._context.replays:
            passes = self._context.rewind(lengths)
            self._leader.queue(order)
            return passes
        with self._leader.whole():
            self._leader.send(order)
            return self._context.rewind(lengths)

    def evaluate(self) -> None:
        with self._leader.whole():
            self._leader.send(Order(Op.EVALUATE, self._number))
            self._context.evaluate()

    def join(self, other: Context) -> None:
        assert isinstance(other, LedContext)
        self._context.join(other._context)
        self._leader.queue(Order(Op.JOIN, self._number, (other._number,)))

    def filter(self, keep: Sequence[int]) -> None:
        self._context.filter(keep)
        self._leader.queue(Order(Op.FILTER, self._number, tuple(keep)))

    def reusable(self, sequence: int) -> Reusable:
        return Reusable()
