"""A request's choices on the way from the engine to one client.

The engine's thread hands over parts; here they are awaited, for as long as the request may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..decoding.run import STUCK
from ..decoding.stop_criteria import Emission
from ..engine.many import Part
from .engine import STOPPING, Engine, QueueFull
from .figures import Choice
from .guard import tell
from .messages import MessagesWire
from .problems import Problem, busy, failed, wrong
from .requests import Asked
from .tgi import TgiWire
from .wire import KEEP_ALIVE, Told, event
from .wire import Wire as OpenAIWire


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


PING_SECONDS = 15.0
"""After which a stream that has nothing to say says so, for the proxies on its way."""
SLOWEST_READER = 60.0
"""Seconds that a client has to read a stream, beyond the time of its request."""
AT_ONCE = 64
"""Entries of a list that are serialized in one call of json.dumps."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Wire = OpenAIWire | TgiWire | MessagesWire


async def answer(
    engine: Engine, request: Request, asked: Asked, wire: Wire, seconds: float
) -> Response | Told:
    """A stream, or the whole answer, in so many seconds. Raises Problem, ClientDisconnect."""
    talk = Talk(engine, asked, seconds)
    if asked.stream:
        return EventStream(_events(talk, wire, asked), lambda: _end(request, talk, asked), seconds)
    try:
        await _while_there(request, _all(talk))
    finally:
        _end(request, talk, asked)
    return await run_in_threadpool(wire.answer, talk.choices, asked.prompt_tokens)


async def as_response(answer: Response | Told | list[Told]) -> Response:
    """Return a stream unchanged, and an object or a list as a JSON response."""
    if isinstance(answer, Response):
        return answer
    return Response(await run_in_threadpool(rendered, answer), media_type="application/json")


def rendered(answer: object) -> bytes:
    """Serialize an answer as JSON in small parts, as json.dumps blocks all other threads."""
    return "".join(_rendered(answer)).encode()


def _rendered(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for at, (name, each) in enumerate(value.items()):
            yield f"{',' if at else '{'}{json.dumps(name)}:"
            yield from _rendered(each)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > AT_ONCE:
        for at in range(0, len(value), AT_ONCE):
            yield f"{',' if at else '['}{_dumps(value[at : at + AT_ONCE])[1:-1]}"
        yield "]"
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield "," if at else "["
            yield from _rendered(each)
        yield "]" if value else "[]"
    else:
        yield _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class EventStream(StreamingResponse):
    """Chunks as server-sent events. end: called when all is said, or the client has left, or has
    read too slowly."""

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], None], seconds: float
    ) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._end = end
        self._seconds = seconds + SLOWEST_READER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            # Whether or not an event was ever asked for.
            self._end()


async def _events(talk: Talk, wire: Wire, asked: Asked) -> AsyncIterator[bytes]:
    async for told in _chunks(talk, wire, asked):
        yield KEEP_ALIVE if told is None else event(told, named=wire.named)
        if told is not None and "error" in told:
            return
    yield wire.done


async def _chunks(talk: Talk, wire: Wire, asked: Asked) -> AsyncIterator[Told | None]:
    """What is told of the choices as they come; None while nothing does."""
    for index in range(len(talk.choices)):
        for told in wire.first(index):
            yield told
    ended = [False] * len(talk.choices)
    try:
        async for part in talk.parts(PING_SECONDS):
            if part is None:
                yield None
                continue
            index, emission = part
            choice = talk.choices[index]
            ended[index] = choice.reason is not None
            each = await _read(wire, index, functools.partial(wire.piece, index, choice, emission))
            if ended[index]:
                each += await _read(wire, index, functools.partial(wire.end, index, choice))
            for told in each:
                yield told
    except Problem as problem:
        yield wire.error(problem)
        return
    cut = [each for each, over in enumerate(ended) if not over]
    for index in cut:
        for told in await _read(
            wire, index, functools.partial(wire.end, index, talk.choices[index])
        ):
            yield told
    for told in wire.rest(talk.choices, asked):
        yield told


async def _read(wire: Wire, index: int, work: Callable[[], list[Told]]) -> list[Told]:
    """Return what `work` returns, computed in another thread when it may take long."""
    return await run_in_threadpool(work) if wire.slow(index) else work()


async def _all(talk: Talk) -> None:
    async for _ in talk.parts():
        pass


async def _while_there(request: Request, work: Any) -> None:
    """Wait for `work` as long as the client does. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _end(request: Request, talk: Talk, asked: Asked) -> None:
    """Give up what has not come, and put into the log what has."""
    talk.close()
    results = [each.result for each in talk.choices if each.result is not None]
    tell(
        request,
        prompt_tokens=asked.prompt_tokens,
        tokens=sum(each.tokens for each in talk.choices),
        draft_n=sum(each.stats.drafted for each in results),
        draft_n_accepted=sum(each.stats.accepted for each in results),
    )
