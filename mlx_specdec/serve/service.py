"""The service of all endpoints. It reads bodies within limits, submits requests to the engine of
their model, and sends answers over HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Full
from typing import Any

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import DecodingError, SpecdecError
from ..results import STUCK, Step
from .answers import EVENTS, Choice, Payload, Writer
from .bodies import Body, Fields, parse
from .engine import STOPPING, Engine
from .events import Event
from .problems import Problem, busy, failed, invalid
from .registry import Registry, ServedModel
from .requests import RequestParser
from .stored import StoredResponses
from .tasks import EngineTask, Stopped

JSON = "application/json"
SMALL_BODY = 1 << 16
"""Bytes of each body that do not count towards the limit of all bodies together."""
HEARTBEAT_SECONDS = 15.0
"""Seconds between two comments in a silent stream. They keep proxies from closing it."""
POLL_SECONDS = 0.5
"""Seconds between two checks whether a client that waits for a complete answer has left."""
LOAD_POLL_SECONDS = 0.05
"""Seconds between two checks whether a model takes requests."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Answer = Payload | Response | Writer | EngineTask


def error_response(problem: Problem) -> Response:
    """Return an error in OpenAI's format."""
    return JSONResponse(problem.as_dict(), problem.status, problem.headers)


@dataclass(frozen=True)
class Endpoint:
    """A path with its handler and its description in /openapi.json.

    Attributes:
        handler: For a POST, a function of a RequestParser and a checked Body that returns the
            answer, or the Writer or the EngineTask of the answer; None if `early` answers all
            requests. For other methods, a function of (Service, Request).
        answer: The type of the answer, or None if it is not JSON.
        media: The media type of an answer that is not JSON.
        streams: The media type of a streamed answer.
        summary: A phrase for /openapi.json.
        body: The model of the body, if the method is POST.
        error: Returns the status and the payload of a Problem.
        verb: The method of a path without a body.
        waits: Whether its requests always wait while their model is loaded.
        early: Returns the answer to a body that needs no model in memory, or None.
    """

    path: str
    handler: Callable[[Any, Any], Answer] | None
    answer: Any
    summary: str
    body: type[Fields] | None = None
    media: str = JSON
    streams: str = EVENTS
    error: Callable[[Problem], tuple[int, Payload]] = Writer.error
    verb: str = "GET"
    waits: bool = False
    early: Callable[["Service", ServedModel, Body], Payload | None] = lambda *request: None

    @property
    def method(self) -> str:
        """POST for a path with a body."""
        return self.verb if self.body is None else "POST"


class Service:
    """The models and the settings that all endpoints share.

    Attributes:
        settings: The settings of the first model; limits of bodies are the same for all models.
        stopping: Whether the server will soon refuse requests; /health reports this.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.settings = registry.first.settings
        self.created = int(time.time())
        self.responses = StoredResponses()
        self.stopping = False
        self._large_bytes = 0

    def parser(self, request: Request) -> RequestParser:
        """Return the parser for the model that the query `model` of a request without a body names.
        Raises Problem if that is not in memory."""
        return self.registry.parser(self.registry.find(request.query_params.get("model")))

    async def respond(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request. Raises ClientDisconnect."""
        try:
            if endpoint.body is not None:
                answer = await self._parse(request, endpoint)
            else:
                assert endpoint.handler is not None, "`early` answers only a POST"
                answer = endpoint.handler(self, request)
            if isinstance(answer, ResponseStream):
                return await self._generate(request, answer)
            assert not isinstance(answer, Writer | EngineTask), "the engine has them"
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except Problem as problem:
            status, payload = endpoint.error(problem)
            return JSONResponse(payload, status, problem.headers)

    async def _parse(self, request: Request, endpoint: Endpoint) -> "Answer | ResponseStream":
        """Read a body, and return the handler's answer, or the stream of its Writer. The handler
        runs in another thread. Raises Problem, and ClientDisconnect if the client leaves while the
        model is loaded."""
        limits = self.settings.limits
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            message = f"a body with the content encoding {coding:.20} is not read: send it plainly"
            raise Problem(415, message)
        data, large = bytearray(), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limits.body_bytes:
                        message = f"the body has more than {limits.body_bytes} bytes: shorten it"
                        raise Problem(413, message)
                    more = max(0, len(data) - SMALL_BODY) - large
                    if self._large_bytes + more > limits.large_bytes:
                        raise busy("too many large bodies come at once: try again", 429)
                    self._large_bytes, large = self._large_bytes + more, large + more
            model, body = await run_in_threadpool(self._checked, endpoint, bytes(data))
            if (early := endpoint.early(self, model, body)) is not None:
                return early
            waited = await self._prepare(request, model, endpoint.waits or self.registry.waits)
            model.leases += 1
            try:
                tenant = request.scope.get("tenant", "")
                parser = self.registry.parser(model, self.responses, tenant, waited)
                answer = await run_in_threadpool(_handled, endpoint, parser, body)
                if not isinstance(answer, Writer | EngineTask):
                    return answer
                assert model.engine is not None, "a model with leases is not unloaded"
                if isinstance(answer, EngineTask):
                    return await self._compute(request, model.engine, answer)
                return ResponseStream(model.engine, answer, limits.seconds)
            finally:
                model.leases -= 1
        except TimeoutError:
            raise Problem(408, "the body took too long to come") from None
        finally:
            self._large_bytes -= large

    def _checked(self, endpoint: Endpoint, data: bytes) -> tuple[ServedModel, Body]:
        """Return the model that a body names, and the canonical form of the body. Raises
        Problem."""
        assert endpoint.body is not None, "only a POST has a body"
        body = parse(data)
        return self.registry.find(body.get("model")), endpoint.body.read(body)

    async def _prepare(self, request: Request, model: ServedModel, waits: bool) -> float:
        """Return after a model takes requests, with the seconds for which the request has waited.
        Raises Problem, at once unless it waits, and ClientDisconnect if the client leaves."""
        began, counted = time.monotonic(), False
        try:
            while not self.registry.prepare(model):
                # Requests for a loaded model that must leave do not count, or it would never leave.
                if not counted and model.state != "loaded":
                    model.waiting, counted = model.waiting + 1, True
                seconds = time.monotonic() - began
                if not waits or seconds > self.settings.limits.seconds:
                    raise self.registry.not_loaded(model)
                if await request.is_disconnected():
                    raise ClientDisconnect
                await asyncio.sleep(LOAD_POLL_SECONDS)
        finally:
            model.waiting -= counted
        return time.monotonic() - began

    async def _generate(self, request: Request, stream: "ResponseStream") -> Response:
        """Generate an answer, complete or as a stream. Raises Problem and ClientDisconnect."""

        async def end() -> None:
            stream.close()
            request.scope.setdefault("log_fields", {}).update(stream.figures())

        if stream.writer.stream:
            # The task runs even if the client has left.
            media = stream.writer.media
            return StreamingResponse(
                stream.events(), 200, STREAM_HEADERS, media, background=BackgroundTask(end)
            )
        try:
            answer = await stream.complete(request)
        finally:
            await end()
        return await run_in_threadpool(JSONResponse, answer)

    async def _compute(self, request: Request, engine: Engine, task: EngineTask) -> Response:
        """Let the engine compute an answer. Raises Problem and ClientDisconnect."""
        request.scope.setdefault("log_fields", {})["prompt_tokens"] = task.prompt_tokens
        with _refused():
            future = asyncio.wrap_future(engine.run(task))
        deadline = time.monotonic() + self.settings.limits.seconds
        try:
            while not (await asyncio.wait([future], timeout=POLL_SECONDS))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
                if engine.closed:  # the current step may take long
                    raise Stopped
                if time.monotonic() > deadline:
                    raise busy("the time of this request was over: try again later", 503, "timeout")
            return await run_in_threadpool(lambda: JSONResponse(task.answer(future.result())))
        except DecodingError as error:
            raise failed(str(error)) from None
        except SpecdecError as error:
            raise invalid(str(error), "input") from None
        except Stopped:
            raise busy(STOPPING) from None
        finally:
            future.cancel()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raise Problem if the engine accepts no more requests."""
    try:
        yield
    except Full:
        raise busy("too many requests wait already: try again", 429, "queue_full") from None
    except RuntimeError:
        raise busy(STOPPING) from None


def _handled(endpoint: Endpoint, parser: RequestParser, body: Body) -> Answer:
    assert endpoint.handler is not None, "`early` has not answered"
    try:
        return endpoint.handler(parser, body)
    except SpecdecError as error:
        # Errors of options begin with their names.
        name = str(error).partition(" ")[0].replace("-", "_")
        raise invalid(str(error), name if name in body else None) from None


Output = tuple[Choice, Step | None, list[Event]]
"""A choice, its newest step (None at the end of the choice), and the events in the step's text."""


class ResponseStream:
    """The answer to one request, on its way from the engine to the client. Raises Problem if the
    engine accepts no more requests."""

    def __init__(self, engine: Engine, writer: Writer, seconds: float) -> None:
        self._parsed = parsed = writer.request
        self.choices = [
            Choice(at, parsed.reader(), thoughts=request.thoughts)
            for at, request in enumerate(parsed.requests)
        ]
        self._engine = engine
        self.writer = writer
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._arrived: asyncio.Queue[Step] = asyncio.Queue()
        with _refused():
            numbers = engine.submit(parsed.requests, self._receive)
        self._open = dict(zip(numbers, self.choices, strict=True))

    async def complete(self, request: Request) -> Payload | list[Payload]:
        """Return the complete answer. Raises Problem, and ClientDisconnect if the client leaves."""
        async for _ in self._outputs(POLL_SECONDS):
            if await request.is_disconnected():
                raise ClientDisconnect
        return self.writer.answer(self.choices)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer, with a comment in long silences."""
        writer = self.writer

        def sent(payloads: Sequence[Payload]) -> bytes:
            return b"".join(writer.encoded(payload) for payload in payloads)

        try:
            yield sent([payload for choice in self.choices for payload in writer.start(choice)])
            async for output in self._outputs(HEARTBEAT_SECONDS):
                if output is None:
                    yield sent(writer.silence()) or writer.heartbeat
                    continue
                choice, step, events = output
                payloads = writer.piece(choice, step or Step(), events)
                if step is None:
                    payloads += writer.end(choice)
                yield sent(payloads)
            yield sent(writer.rest(self.choices)) + writer.done
        except Problem as problem:
            yield sent(writer.failed(problem))

    def figures(self) -> dict[str, int]:
        """Return the numbers of tokens, for the log."""
        return {
            "prompt_tokens": self._parsed.prompt_tokens,
            "tokens": sum(choice.tokens for choice in self.choices),
            "draft_n": sum(choice.drafted for choice in self.choices),
            "draft_n_accepted": sum(choice.accepted for choice in self.choices),
        }

    def close(self) -> None:
        """Cancel what has not been generated yet."""
        self._engine.cancel(list(self._open))
        self._open = {}

    async def _outputs(self, every: float) -> AsyncIterator[Output | None]:
        """Yield the steps of all choices, and None after each `every` seconds without a step. When
        the time of the request is over, open choices are cut. Raises Problem if the engine fails or
        has generated no token in this time."""
        while self._open:
            left = self._deadline - self._loop.time()
            if left <= 0:
                break
            try:
                # wait_for of Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(min(left, every)):
                    step = await self._arrived.get()
            except TimeoutError:
                if left > every:
                    yield None
                continue
            if step.number not in self._open:
                continue  # cancelled meanwhile
            if step.error is not None:
                del self._open[step.number]
                if step.error == STOPPING:
                    raise busy(STOPPING)
                # The client can change a constraint that no text of the model satisfies.
                raise (invalid if step.error == STUCK else failed)(step.error)
            choice = self._open[step.number]
            choice.take(step)
            by_drafted = self.writer.include_drafted
            for piece in _by_drafted(step) if by_drafted else [step]:
                yield choice, piece, await _read(choice, piece.text)
            if step.last:
                del self._open[step.number]
                yield choice, None, await _read(choice, None)
        cut = list(self._open.values())
        self.close()
        if cut and not any(choice.tokens for choice in self.choices):
            message = "the time of this request was over before it had a token: try again later"
            raise Problem(503, message, code="timeout", headers={"Retry-After": "10"})
        for choice in cut:
            choice.finish_reason = "length"
            yield choice, None, await _read(choice, None)

    def _receive(self, step: Step) -> None:
        """Put a step into the queue. Called by the engine's thread."""
        # The event loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, step)


async def _read(choice: Choice, text: str | None) -> list[Event]:
    """Read the next piece of a choice. Tool calls, which may take long, are read in a thread."""
    calling = choice.reader.section is not None
    return await run_in_threadpool(choice.read, text) if calling else choice.read(text)


def _by_drafted(step: Step) -> list[Step]:
    """Split a step into accepted draft tokens and the target's own tokens."""
    count, chars = step.accepted, step.accepted_chars
    if count == len(step.tokens):
        return [step]
    of_drafts = replace(
        step,
        tokens=step.tokens[:count],
        text=step.text[:chars],
        logprobs=step.logprobs[:count],
        finish_reason=None,
    )
    own = replace(
        step,
        tokens=step.tokens[count:],
        accepted=0,
        text=step.text[chars:],
        accepted_chars=0,
        logprobs=step.logprobs[count:],
    )
    return [of_drafts, own] if count else [step]
