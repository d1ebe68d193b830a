"""All ranks but 0: they do with their part of the target what rank 0 says, and nothing else.

They know no prompt's text, no draft, no rule and no clock.
"""

from __future__ import annotations

from ..contracts import Context
from ..models.base import Base
from .channel import Channel, Message, Op, Order
from .leader import run_pass, time_sums


def follow(model: Base, channel: Channel) -> int:
    """Do what comes until the end; returns the code that all ranks exit with."""
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


class Follower:
    """The contexts of one rank. model: this rank's part."""

    def __init__(self, model: Base) -> None:
        self._model = model
        self._contexts: dict[int, Context] = {}

    def do(self, order: Order, message: Message) -> None:
        """One order of a message."""
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
