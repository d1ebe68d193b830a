"""What all endpoints need: bodies within the limits, the engine, and answers over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..decoding.stop_criteria import Emission
from ..engine.request import STUCK, Part
from ..errors import SpecdecError
from .answers import Choice, ParsedRequest, Payload, Writer, rendered, server_sent_event
from .body import Body, parse
from .engine import STOPPING, Engine, QueueFull
from .events import Event
from .problems import Problem, busy, failed, invalid
from .requests import RequestParser
from .settings import ServiceSettings

JSON, EVENTS = "application/json", "text/event-stream"
SMALL_BODY = 1 << 16
"""Bytes of each body that do not count towards the limit of all bodies together, so that large
bodies cannot keep small ones out."""
HEARTBEAT_SECONDS = 15.0
"""A silent stream sends a comment this often, for the proxies on its way."""
HEARTBEAT = b": keep-alive\n\n"
SLOWEST_READER = 60.0
"""Seconds that a client has to read a stream, beyond the time of its request."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
T = TypeVar("T")


def error_response(problem: Problem) -> Response:
    """Return an error in OpenAI's format."""
    return JSONResponse(problem.as_dict(), problem.status, problem.headers)


Handler = Callable[["Service", Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """A method and path, its handler, and what /openapi.json says about it.

    body, answer: names of schemas. error: makes the response for a Problem of the handler.
    """

    method: str
    path: str
    handler: Handler
    answer: str
    summary: str
    body: str = ""
    media: str = JSON
    error: Callable[[Problem], Response] = error_response


def get(path: str, handler: Handler, answer: str, summary: str, media: str = JSON) -> Endpoint:
    """Return an endpoint for GET."""
    return Endpoint("GET", path, handler, answer, summary, media=media)


def post(path: str, handler: Handler, body: str, answer: str, summary: str) -> Endpoint:
    """Return an endpoint for POST."""
    return Endpoint("POST", path, handler, answer, summary, body)


class Service:
    """A model behind an engine. name: of the model, as clients see it."""

    def __init__(self, engine: Engine, name: str, settings: ServiceSettings) -> None:
        self.engine = engine
        self.name = name
        # A request with more choices would find the queue full for ever.
        most = engine.batch_size + settings.limits.waiting
        limits = replace(settings.limits, choices=min(settings.limits.choices, most))
        self.settings = replace(settings, limits=limits)
        self.created = int(time.time())
        self._large_bytes = 0

    def parser(self) -> RequestParser:
        """Return the parser of requests. Raises Problem while the models are loading."""
        engine = self.engine
        if not engine.ready.is_set():
            raise busy("Loading model", code="loading")
        return RequestParser(engine.pair, engine.options, self.settings, self.name, engine.budget)

    async def parse(self, request: Request, read: Callable[[RequestParser, Body], T]) -> T:
        """Return what `read` makes of the body of a request, in another thread. Raises Problem."""
        parser, body = self.parser(), await self._body(request)
        try:
            return await run_in_threadpool(read, parser, body)
        except SpecdecError as error:
            raise invalid(str(error)) from None

    async def answer(self, request: Request, parsed: ParsedRequest, writer: Writer) -> Response:
        """Generate the answer to a request, whole or as a stream. Raises Problem and
        ClientDisconnect."""
        stream = ResponseStream(self.engine, parsed, writer, self.settings.limits.seconds)

        def end() -> None:
            stream.close()
            log_fields(request).update(stream.figures())

        if parsed.stream:
            return EventStream(stream.events(), end, self.settings.limits.seconds)
        try:
            answer = await _while_connected(request, stream.whole())
        finally:
            end()
        return Response(await run_in_threadpool(rendered, answer), media_type=JSON)

    async def _body(self, request: Request) -> Body:
        """Receive a body. Raises Problem for one that is too large, too slow or no JSON."""
        most, data, large = self.settings.limits.body_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(self.settings.limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise Problem(413, f"the body has more than {most} bytes: shorten it")
                    more = max(0, len(data) - SMALL_BODY) - large
                    if self._large_bytes + more > self.settings.limits.large_bytes:
                        raise busy("too many large bodies come at once: try again", 429)
                    self._large_bytes, large = self._large_bytes + more, large + more
            return await run_in_threadpool(parse, bytes(data))
        except TimeoutError:
            raise Problem(408, "the body took too long to come") from None
        finally:
            self._large_bytes -= large


Step = tuple[int, Emission | None, list[Event]]
"""The index of a choice, what it generated, and the events in that; at its end, None and the events
that were held back."""


class ResponseStream:
    """The answer to one request on its way from the engine to one client.

    Hands the request to the engine, whose thread calls back with the parts of the answer. `close`
    cancels what has not been generated yet. Raises Problem when the engine takes no more requests.
    """

    def __init__(
        self, engine: Engine, parsed: ParsedRequest, writer: Writer, seconds: float
    ) -> None:
        self.choices = [Choice(parsed.reader()) for _ in parsed.requests]
        self._engine = engine
        self._parsed = parsed
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._parts: asyncio.Queue[Part] = asyncio.Queue()
        try:
            numbers = engine.submit(parsed.requests, self._hear)
        except QueueFull:
            raise busy("too many requests wait already: try again", 429, "queue_full") from None
        except RuntimeError:
            raise busy(STOPPING) from None
        self._open = {number: index for index, number in enumerate(numbers)}

    async def whole(self) -> Payload | list[Payload]:
        """Return the whole answer. Raises Problem."""
        async for _ in self._steps():
            pass
        return await run_in_threadpool(self._writer.answer, self.choices)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, with a comment in long silences."""
        async for payload in self._payloads():
            if payload is None:
                yield HEARTBEAT
                continue
            yield server_sent_event(payload, named=self._writer.named)
            if "error" in payload:
                return
        yield self._writer.done

    def figures(self) -> dict[str, int]:
        """Return the numbers of tokens, for the log."""
        stats = [each.result.stats for each in self.choices if each.result is not None]
        return {
            "prompt_tokens": self._parsed.prompt_tokens,
            "tokens": sum(each.tokens for each in self.choices),
            "draft_n": sum(each.drafted for each in stats),
            "draft_n_accepted": sum(each.accepted for each in stats),
        }

    def close(self) -> None:
        """Cancel what has not been generated yet."""
        self._engine.cancel(list(self._open))
        self._open = {}

    async def _payloads(self) -> AsyncIterator[Payload | None]:
        """Yield the payloads of the stream; None after every HEARTBEAT_SECONDS without one."""
        writer = self._writer
        for index in range(len(self.choices)):
            for payload in writer.start(index):
                yield payload
        try:
            async for step in self._steps(HEARTBEAT_SECONDS):
                if step is None:
                    yield None
                    continue
                for payload in self._written(*step):
                    yield payload
        except Problem as problem:
            yield writer.error(problem)
            return
        for payload in writer.rest(self.choices):
            yield payload

    def _written(self, index: int, emission: Emission | None, events: list[Event]) -> list[Payload]:
        choice = self.choices[index]
        if emission is None:
            return self._writer.end(index, choice, events)
        return self._writer.piece(index, choice, emission, events)

    async def _steps(self, every: float = 3600.0) -> AsyncIterator[Step | None]:
        """Yield what was generated, as it comes; None after every `every` seconds without anything.

        When the time of the request is over, the texts are cut. Raises Problem where the engine
        fails, or has generated nothing in that time.
        """
        while self._open:
            left = self._deadline - self._loop.time()
            if left <= 0:
                break
            try:
                # wait_for of Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(min(left, every)):
                    part = await self._parts.get()
            except TimeoutError:
                if left > every:
                    yield None
                continue
            if part.number not in self._open:
                continue  # cancelled meanwhile
            if part.error is not None:
                del self._open[part.number]
                raise _problem_of(part.error)
            index = self._open[part.number]
            choice = self.choices[index]
            choice.take(part.emission, part.result)
            by_drafted = self._parsed.include_drafted
            for emission in _by_drafted(part.emission) if by_drafted else [part.emission]:
                yield index, emission, await _read(choice, emission.text)
            if part.last:
                del self._open[part.number]
                yield index, None, await _read(choice, None)
        cut = list(self._open.values())
        self.close()
        if cut and not any(each.tokens for each in self.choices):
            raise Problem(
                503,
                "the time of this request was over before it had a token: try again later",
                code="timeout",
                headers={"Retry-After": "10"},
            )
        for index in cut:
            self.choices[index].finish_reason = "length"
            yield index, None, await _read(self.choices[index], None)

    def _hear(self, part: Part) -> None:
        # The loop may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)


async def _read(choice: Choice, text: str | None) -> list[Event]:
    """Return the events of a further piece of a choice, or those at its end for None. The end of a
    section of tool calls may take long to read, and is read in another thread."""

    def work() -> list[Event]:
        return choice.finish() if text is None else choice.read(text)

    return await run_in_threadpool(work) if choice.reader.inside else work()


def _by_drafted(emission: Emission) -> list[Emission]:
    """Split what a step generated into accepted drafts and the target's own tokens."""
    count = emission.drafted

    def part(tokens: slice, drafted: bool) -> Emission:
        pieces = tuple(each for each in emission.pieces if each.drafted == drafted)
        logprobs = emission.logprobs[tokens]
        return Emission(
            emission.tokens[tokens], pieces, None, logprobs, drafted=count if drafted else 0
        )

    parts = [part(slice(count), drafted=True), part(slice(count, None), drafted=False)]
    parts = [each for each in parts if each.tokens or each.text]
    if parts:
        parts[-1] = replace(parts[-1], finish_reason=emission.finish_reason)
    return parts


def _problem_of(error: str) -> Problem:
    """Return the problem of a request that the engine ended with an error."""
    if error == STOPPING:
        return busy(error)
    # The client can change a constraint that no text of the model satisfies.
    return invalid(error) if error == STUCK else failed(error)


class EventStream(StreamingResponse):
    """A stream of server-sent events. end: called when the stream has ended, whether the client has
    read all of it, left, or read too slowly."""

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], None], seconds: float
    ) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type=EVENTS)
        self._end = end
        self._seconds = seconds + SLOWEST_READER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            # Even where the first event was never requested.
            self._end()


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work` as long as the client is connected. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def log_fields(request: Request) -> dict[str, Any]:
    """Return the fields that the access log adds to the line of a request."""
    fields: dict[str, Any] = request.scope.setdefault("log_fields", {})
    return fields
