"""A request's choices on the way from the engine to one client.

The engine's thread hands over parts; here they are awaited, for as long as the request may take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ..decoding.run import STUCK
from ..decoding.stop_criteria import Emission
from ..many import Part
from .asked import Asked
from .engine import STOPPING, Engine, QueueFull
from .problems import Problem, busy, failed, wrong
from .wire import Choice


class Talk:
    """Iterate `parts` for what comes; `close` gives up what has not come yet.

    Raises Problem where the engine takes no more requests.
    """

    def __init__(self, engine: Engine, asked: Asked, seconds: float) -> None:
        self.choices = [Choice() for _ in asked.requests]
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + seconds
        self._parts: asyncio.Queue[Part] = asyncio.Queue()
        try:
            numbers = engine.submit(asked.requests, self._hear)
        except QueueFull:
            raise busy("too many requests wait already: try again", 429, "queue_full") from None
        except RuntimeError:
            raise busy(STOPPING) from None
        self._open = {number: index for index, number in enumerate(numbers)}

    async def parts(self, every: float = 3600.0) -> AsyncIterator[tuple[int, Emission] | None]:
        """The index of a choice and what has come of it, when something has; None when nothing has
        come for `every` seconds.

        Ends when all choices have, or when the time is over, which cuts what is still open. Raises
        Problem where the engine failed.
        """
        while self._open:
            left = self._ends - self._loop.time()
            if left <= 0:
                self._cut()
                return
            try:
                # wait_for of Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(min(left, every)):
                    part = await self._parts.get()
            except TimeoutError:
                if left > every:
                    yield None
                continue
            if part.number not in self._open:
                continue  # closed meanwhile
            index = self._open[part.number]
            if part.last:
                del self._open[part.number]
            if part.error is not None:
                raise _problem(part.error)
            self.choices[index].take(part.emission, part.result)
            yield index, part.emission

    def close(self) -> None:
        """Nobody wants the rest."""
        self._engine.cancel(list(self._open))
        self._open = {}

    def _cut(self) -> None:
        self.close()
        if not any(each.tokens for each in self.choices):
            raise Problem(
                503,
                "the time of this request was over before it had a token: try again later",
                code="timeout",
                headers={"Retry-After": "10"},
            )
        for each in self.choices:
            each.cut()

    def _hear(self, part: Part) -> None:
        # After the loop's end nobody listens.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)


def _problem(error: str) -> Problem:
    """What is told of a request that the engine ended."""
    if error == STOPPING:
        return busy(error)
    # What no text of the model fits is the client's to change.
    return wrong(error) if error == STUCK else failed(error)
