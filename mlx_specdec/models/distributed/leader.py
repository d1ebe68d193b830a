"""A target that ranks share: rank 0 leads, and the others follow its orders.

Rank 0 runs the whole program over contexts that send each call to the others before they do it
themselves. The others do the same with their part of the target, and know no prompt's text, no
draft, no rule and no clock.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import mlx.core as mx

from ...errors import DecodingError, OptionError
from ...interfaces import FINAL, Context, Scores
from ...interfaces.reusable import Cached, Reusable
from ..base import Base
from .orders import Channel, Message, Op, Order


class Follower:
    """The contexts of a rank that follows. model: this rank's part."""

    def __init__(self, model: Base) -> None:
        self._model = model
        self._contexts: dict[int, Context] = {}

    def do(self, order: Order, message: Message) -> None:
        """Follow one order of a message."""
        if order.op is Op.OPEN:
            self._contexts[order.context] = self._opened(order.numbers)
            return
        if order.op is Op.CLOSE:
            # One that has joined another is no more.
            self._contexts.pop(order.context, None)
            return
        context = self._contexts[order.context]
        if order.op is Op.ADVANCE:
            batch, rows, proposed = order.numbers[:3]
            run_pass(context, message, batch, rows, proposed, ())
        elif order.op is Op.REWIND:
            context.rewind(order.numbers)
        elif order.op is Op.EVALUATE:
            context.evaluate()
        elif order.op is Op.JOIN:
            context.join(self._contexts.pop(order.numbers[0]))
        else:
            context.filter(order.numbers)

    def _opened(self, numbers: tuple[int, ...]) -> Context:
        joins, count, *rest = numbers
        prompts, place = [], count
        for length in rest[:count]:
            prompts.append(rest[place : place + length])
            place += length
        return self._model.open_batch(prompts) if joins else self._model.open(prompts[0])


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
    """Submit the pass that a message orders as far as ranks work on it together: all that follows
    needs no other rank. Every rank builds it from the same array, in the same way."""
    wanted = taps if FINAL in taps else (*taps, FINAL)
    scores = context.advance(message.tokens(batch, rows), proposed, wanted)
    mx.async_eval(scores.hidden[FINAL])
    return scores


def time_sums(model: Base, channel: Channel, rows: int, count: int) -> float:
    """Time `count` sums of hidden states of `rows` tokens, in seconds, each behind the one before
    it as those of layers are. All ranks have to come, and are there when it begins."""
    states = mx.zeros((1, rows, model.width), dtype=model.state_dtype)
    mx.eval(channel.total(states))
    started = time.perf_counter()
    for _ in range(count):
        states = channel.total(states)
    mx.eval(states)
    return time.perf_counter() - started


class Leader:
    """Sends orders to the other ranks; what can wait goes along with the next pass."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queued: deque[Order] = deque()
        self._numbers = itertools.count()
        self._inside = False
        self._interrupted = False
        self._broken = False
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)

    def number(self) -> int:
        """Return the number of a new context."""
        return next(self._numbers)

    @property
    def lost(self) -> bool:
        """Whether a pass was left in its middle; all ranks then have to be started again."""
        return self._broken

    def queue(self, order: Order) -> None:
        """Send an order with what comes next."""
        self._queued.append(order)

    def send(self, order: Order, tokens: mx.array | None = None) -> Message:
        """Send an order now. What the ranks do together has to follow at once, within `whole`."""
        orders = []
        while self._queued:
            orders.append(self._queued.popleft())
        return self._channel.send([*orders, order], tokens)

    def time_sums(self, model: Base, rows: int, count: int) -> float:
        """As the function `time_sums`, with all others. model: rank 0's part of the target."""
        with self.whole():
            self.send(Order(Op.SUM, 0, (rows, count)))
            return time_sums(model, self._channel, rows, count)

    def end(self, code: int) -> None:
        """Have all others exit with this code, and wait until the order has gone out. Where a pass
        was left in its middle nobody would understand it."""
        if not self._broken:
            mx.eval(self.send(Order(Op.END, 0, (code,))).whole)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep an interrupt from dividing an order to the others from this rank's part.

        Raises DecodingError where that has happened.
        """
        if self._broken:
            raise DecodingError("the ranks have lost step: start again")
        self._inside = self._broken = True
        try:
            yield
            self._broken = False
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
    """base.Base: a model whose contexts lead. All other attributes are the model's, and
    `isinstance` sees its class."""

    def __init__(self, model: Base, leader: Leader) -> None:
        self._model = model
        self._leader = leader

    def __getattr__(self, name: str) -> Any:
        if name == "network":
            raise OptionError(
                "this needs all of the target's weights in one place: leave out distributed"
            )
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    @property
    def lost(self) -> bool:
        return self._leader.lost

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> Context:
        """cached: not used, since each rank has a part of it."""
        return self._led(self._model.open(prompt), [prompt], joins=False)

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        """See `open`."""
        return self._led(self._model.open_batch(prompts), prompts, joins=True)

    def _led(self, context: Context, prompts: Sequence[Sequence[int]], *, joins: bool) -> Context:
        number, lengths = self._leader.number(), map(len, prompts)
        numbers = (joins, len(prompts), *lengths, *itertools.chain.from_iterable(prompts))
        self._leader.queue(Order(Op.OPEN, number, tuple(map(int, numbers))))
        return LedContext(self._leader, number, context, getattr(self._model, "tap", None))


def led(model: Base, leader: Leader) -> Base:
    """The model as rank 0 uses it."""
    return cast(Base, LedModel(model, leader))


class LedContext:
    """interfaces.Context: sequences that all ranks know by a number. tap: refuses hidden states
    that the model does not show."""

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

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """The others do it with the next pass, unless it is one."""
        order = Order(Op.REWIND, self._number, lengths)
        if not self._context.replays:
            self._context.rewind(lengths)
            self._leader.queue(order)
            return
        with self._leader.whole():
            self._leader.send(order)
            self._context.rewind(lengths)

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
        """Nothing: each rank has a part of it."""
        return Reusable()
