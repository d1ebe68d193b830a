"""What all endpoints share: a wire format writes the answer to a request, which waits for its
model, lets the engine of the model generate, and is answered over HTTP."""

import asyncio
import functools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import DecodingError, SpecdecError
from ..results import INEXACT, STUCK, Result, Step, TokenLogprob
from ..text.thoughts import Thoughts
from ..version import __version__
from .engine import STOPPING, Engine, EngineTask
from .events import Event, Reader
from .fields import Body
from .problems import Problem, busy, failed, invalid
from .registry import Registry
from .requests import CompletionBody, LoadedModel

Payload = dict[str, Any]
FINGERPRINT = f"mlx-specdec-{__version__}"
LEAST_LOGPROB = -9999.0
"""The logprob that is sent in place of minus infinity, which JSON lacks."""
HEARTBEAT_SECONDS = 15.0
"""Seconds between two comments in a silent stream. They keep proxies from closing it."""
POLL_SECONDS = 0.5
"""Seconds between two checks whether a client that waits for a complete answer has left."""
LOAD_POLL_SECONDS = 0.05
"""Seconds between two checks whether a model takes requests."""
# The client can change a constraint that no text of the model satisfies.
PROBLEMS: Mapping[str, Callable[[str], Problem]] = {
    STOPPING: busy,
    STUCK: invalid,
    INEXACT: invalid,
}
"""Beginnings of the engine's errors for which a request may be repeated or changed, with their
functions."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass
class Choice:
    """One completion of an answer, as far as it was generated.

    Attributes:
        drafted: Number of draft tokens.
        finish_reason: The engine's reason, or None before the end. It is "length" for a completion
            that was cut because of the time limit.
        stop: The stop string that ended the completion, or "".
        result: The engine's result, or None before the end and for a completion that was cut.
        thoughts: The thoughts so far, or None if the model marks none.
        logprobs: The log-probabilities of its tokens, if they are requested. Those of all prompt
            tokens but the first come before them, if they are requested, too.
    """

    index: int = 0
    reader: Reader = field(default_factory=Reader)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    stop: str = ""
    result: Result | None = None
    thoughts: Thoughts | None = None

    @property
    def complete(self) -> bool:
        """Whether the model or a stop string ended the completion, and not a limit."""
        return self.finish_reason in ("eos", "stop")

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of thoughts, without the marks around them."""
        return 0 if self.thoughts is None else self.thoughts.tokens

    def take(self, step: Step) -> None:
        """Add what a step generated."""
        self.logprobs += [*step.prompt_logprobs, *step.logprobs]
        self.tokens += len(step.tokens)
        if self.thoughts is not None:
            ended = step.finish_reason == "eos"
            self.thoughts = self.thoughts.after(step.tokens[: -1 if ended else None])
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.stop = step.stop
        self.result = step.result
        self.finish_reason = step.finish_reason

    async def read(self, text: str | None) -> list[Event]:
        """Add and return the events of the next piece of text. None is the end of the text. Tool
        calls, which may take long, are read in a thread."""
        read = self.reader.read
        calling = self.reader.section is not None
        events = await run_in_threadpool(read, text) if calling else read(text)
        self.events += events
        return events


class Writer(ABC):
    """The wire format of one answer: it writes a complete answer, the payloads of a stream, or an
    error.

    Attributes:
        model: The name of the model for clients.
        prepared: The request to the engine.
        body: The body of the request.
        stream: Whether the answer is a stream.
        tokenizer: The tokenizer of the model.
        media: The media type of a stream.
        include_drafted: Whether payloads of a stream say if their text was drafted.
    """

    media = "text/event-stream"
    include_drafted = False

    def __init__(self, model: LoadedModel, body: CompletionBody) -> None:
        self.model, self.prepared, self.body = model.name, body.prepared(model), body
        self.stream, self.tokenizer = body.stream, model.pair.tokenizer

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        """Return the HTTP status and the body with which the writer's API reports an error. This is
        OpenAI's form."""
        error = {"message": problem.message, "type": problem.type}
        return problem.status, {"error": {**error, "param": problem.param, "code": problem.code}}

    def failed(self, problem: Problem) -> Iterable[Payload]:
        """Return the payloads that end a stream early."""
        return [self.error(problem)[1]]

    def encoded(self, payload: Payload) -> bytes:
        """Return the bytes of a payload of a stream. A payload with a type is an event with this
        name."""
        name = f"event: {payload['type']}\n" if "type" in payload else ""
        # JSON is written in ASCII, because httpx ends lines at U+0085, U+2028 and U+2029 too.
        return f"{name}data: {json.dumps(payload)}\n\n".encode()

    def silence(self) -> bytes:
        """Return the bytes that keep proxies and clients from closing a silent stream."""
        return b": keep-alive\n\n"

    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        """Return the complete answer: by default, the end of a stream that has all events."""
        [choice] = choices
        return self.last(choice, choice.events)

    def start(self, choice: Choice) -> Iterable[Payload]:
        """Return the payloads before the first text of a choice."""
        return ()

    @abstractmethod
    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterable[Payload]:
        """Return the payloads of one step. events: The events in the step's text."""

    def end(self, choice: Choice) -> Iterable[Payload]:
        """Return the payloads at the end of a choice."""
        return [self.last(choice, ())]

    @abstractmethod
    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        """Return the payload that ends a choice. events: The events that it contains, if it can
        contain any."""

    def rest(self, choices: Sequence[Choice]) -> bytes:
        """Return the bytes of a stream after all choices."""
        return b""

    def cached_tokens(self, choices: Sequence[Choice]) -> int:
        """Return the number of cached prompt tokens, counting each prompt once."""
        labels = [choice.result.labels for choice in choices if choice.result is not None]
        prompt_tokens = sum(label.prompt_tokens for label in labels)
        cached_tokens = sum(label.cached_tokens for label in labels)
        return cached_tokens * self.prepared.prompt_tokens // max(1, prompt_tokens)

    @staticmethod
    def timings(choices: Sequence[Choice]) -> dict[str, Payload]:
        """Return llama.cpp's figures of times and drafts, or {} if every choice was cut."""
        results = [choice.result for choice in choices if choice.result is not None]
        if not results:
            return {}
        prompt_ms = 1000 * max(result.stats.seconds.prompt for result in results)
        predicted_ms = 1000 * max(result.stats.seconds.decoding for result in results)
        cache_n = sum(result.labels.cached_tokens for result in results)
        prompt_n = sum(result.labels.prompt_tokens for result in results) - cache_n
        predicted_n = sum(len(result.tokens) for result in results)
        figures: Payload = {"cache_n": cache_n}
        parts = {"prompt": (prompt_n, prompt_ms), "predicted": (predicted_n, predicted_ms)}
        for name, (n, ms) in parts.items():
            figures[f"{name}_n"], figures[f"{name}_ms"] = n, round(ms, 3)
            figures[f"{name}_per_token_ms"] = round(ms / n, 3) if n else 0.0
            figures[f"{name}_per_second"] = round(1000 * n / ms, 3) if ms else 0.0
        if any(result.labels.proposer != "none" for result in results):
            figures["draft_n"] = sum(result.stats.drafted for result in results)
            figures["draft_n_accepted"] = sum(result.stats.accepted for result in results)
        return {"timings": figures}


Sent = TypeVar("Sent", bound=Body)
Make = Callable[[LoadedModel, Sent], Writer | EngineTask | Payload]


def registry_of(http: Request) -> Registry:
    """Return the registry of the server that answers a request."""
    registry: Registry = http.app.state.registry
    return registry


def loaded_of(http: Request) -> LoadedModel:
    """Return the model that the query `model` of a request without a body names. Raises Problem if
    that is not in memory."""
    registry = registry_of(http)
    return registry.loaded(registry.find(http.query_params.get("model")))


def streamed(writer: type[Writer]) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI document says of a writer's streams, besides complete answers."""
    return {200: {"content": {writer.media: {}}}}


def post(
    router: APIRouter,
    path: str,
    kind: type[Body],
    make: Make[Any],
    summary: str,
    responses: dict[int | str, dict[str, Any]] | None = None,
) -> None:
    """Add a route for POST requests.

    Args:
        kind: The model of the bodies.
        make: See `respond`.
        summary: What the route does, for the OpenAPI document.
        responses: Its answers besides JSON, for the document.
    """

    async def answered(body: kind, http: Request) -> Response:  # type: ignore[valid-type]
        return await respond(http, body, make)

    # The module of a route decides how its errors are written.
    answered.__module__ = make.__module__
    router.post(path, summary=summary, responses=responses)(answered)


async def respond(http: Request, body: Sent, make: Make[Sent]) -> Response:
    """Answer a request as soon as its model takes requests, at most until the end of the time. The
    model stays in memory until the answer is prepared.

    Args:
        make: Prepares the answer in another thread. It returns a Writer for what the engine
            generates, a task for the engine, or the answer.
    Raises:
        Problem: If there is no answer.
        ClientDisconnect: If the client leaves.
    """
    registry = registry_of(http)
    model = registry.find(body.model)
    began, counted = time.monotonic(), False
    try:
        while not registry.prepare(model):
            # Requests for a loaded model that must leave do not count, or it would never leave.
            if not counted and model.state != "loaded":
                model.waiting, counted = model.waiting + 1, True
            if not registry.waits:
                raise registry.not_loaded(model)
            await _check_connected(http)
            await asyncio.sleep(LOAD_POLL_SECONDS)
        model.leases += 1
    finally:
        model.waiting -= counted
    try:
        waited = time.monotonic() - began
        loaded = replace(registry.loaded(model), tenant=http.scope["tenant"], load_seconds=waited)
        made = await run_in_threadpool(make, loaded, body)
        if (keep := getattr(body, "keep_alive", None)) is not None:
            model.keep = keep
        engine = model.engine
        assert engine is not None, "a loaded model has an engine"
        if isinstance(made, Writer):
            stream = ResponseStream(engine, made, http.scope["limit"])
            http.scope["end"] = stream.close
        elif isinstance(made, EngineTask):
            engine.run(made)
            http.scope["end"] = functools.partial(dict, prompt_tokens=made.prompt_tokens)
    except SpecdecError as error:
        # Errors of options begin with their names.
        name = str(error).partition(" ")[0].replace("-", "_")
        raise invalid(str(error), name if name in type(body).model_fields else None) from None
    finally:
        model.leases -= 1
    if isinstance(made, EngineTask):
        return await _computed(http, made, engine)
    if not isinstance(made, Writer):
        return JSONResponse(made)
    if made.stream:
        return StreamingResponse(stream.events(), 200, STREAM_HEADERS, made.media)
    return JSONResponse(await stream.complete(http))


async def _computed(http: Request, task: EngineTask, engine: Engine) -> Response:
    """Return the answer that the engine computes. Raises Problem."""
    future = asyncio.wrap_future(task.future)
    try:
        while not future.done():
            await asyncio.wait([future], timeout=POLL_SECONDS)
            await _check_connected(http)
            if engine.closed:  # the current step may take long
                raise busy(STOPPING)
        return await run_in_threadpool(lambda: JSONResponse(task.answer(future.result())))
    except DecodingError as error:
        raise failed(str(error)) from None
    except SpecdecError as error:
        raise invalid(str(error), "input") from None
    finally:
        future.cancel()


async def _check_connected(http: Request) -> None:
    if await http.is_disconnected():
        raise ClientDisconnect


class ResponseStream:
    """The answer to one request, on its way from the engine to the client. Raises Problem if the
    engine accepts no more requests. limit: The limit of time, which cuts the answer."""

    def __init__(self, engine: Engine, writer: Writer, limit: asyncio.Timeout) -> None:
        prepared = writer.prepared
        self.choices = [
            Choice(at, prepared.reader(), thoughts=request.thoughts)
            for at, request in enumerate(prepared.requests)
        ]
        self._engine = engine
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._deadline = limit.when() or math.inf
        self._arrived: asyncio.Queue[Step] = asyncio.Queue()

        def receive(step: Step) -> None:  # in the engine's thread
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, step)

        numbers = engine.submit(prepared.requests, receive)
        limit.reschedule(None)
        self._open = dict(zip(numbers, self.choices, strict=True))

    async def complete(self, http: Request) -> Payload | list[Payload]:
        """Return the complete answer. Raises Problem, and ClientDisconnect if the client leaves."""
        async for _ in self._outputs(POLL_SECONDS):
            await _check_connected(http)
        return self._writer.answer(self.choices)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer, with a comment in long silences."""
        writer = self._writer

        def sent(payloads: Iterable[Payload]) -> bytes:
            return b"".join(writer.encoded(payload) for payload in payloads)

        try:
            yield sent([payload for choice in self.choices for payload in writer.start(choice)])
            async for output in self._outputs(HEARTBEAT_SECONDS):
                if output is None:
                    yield writer.silence()
                    continue
                choice, step, events = output
                ended = writer.end(choice) if step is None else ()
                yield sent([*writer.piece(choice, step or Step(), events), *ended])
            yield writer.rest(self.choices)
        except Problem as problem:
            yield sent(writer.failed(problem))

    def close(self) -> dict[str, int]:
        """Cancel what has not been generated yet, and return the numbers of tokens, for the log."""
        self._engine.cancel(list(self._open))
        return {
            "prompt_tokens": self._writer.prepared.prompt_tokens,
            "tokens": sum(choice.tokens for choice in self.choices),
            "draft_n": sum(choice.drafted for choice in self.choices),
            "draft_n_accepted": sum(choice.accepted for choice in self.choices),
        }

    async def _outputs(
        self, every: float
    ) -> AsyncIterator[tuple[Choice, Step | None, list[Event]] | None]:
        """Yield the steps of all choices, with the choice before them and the events in their texts
        after them. A step of None is the end of a choice. Yield None after each `every` seconds
        without a step. When the time of the request is over, open choices are cut. Raises Problem
        if the engine fails or has generated no token in this time."""
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
            if step.error is not None:
                found = (PROBLEMS[text] for text in PROBLEMS if step.error.startswith(text))
                raise next(found, failed)(step.error)
            choice = self._open[step.number]
            choice.take(step)
            for piece in _by_drafted(step) if self._writer.include_drafted else [step]:
                yield choice, piece, await choice.read(piece.text)
            if step.last:
                del self._open[step.number]
                yield choice, None, await choice.read(None)
        cut = list(self._open.values())
        self.close()
        if cut and not any(choice.tokens for choice in self.choices):
            message = "the time of this request was over before it had a token: try again later"
            raise busy(message, code="timeout", seconds=10)
        for choice in cut:
            choice.finish_reason = "length"
            yield choice, None, await choice.read(None)


def _by_drafted(step: Step) -> list[Step]:
    """Split a step into accepted draft tokens and the target's own tokens."""
    count, chars = step.accepted, step.accepted_chars
    if count in (0, len(step.tokens)):
        return [step]
    parts = (slice(count), slice(chars)), (slice(count, None), slice(chars, None))
    drafted, own = (
        replace(step, tokens=step.tokens[at], text=step.text[text], logprobs=step.logprobs[at])
        for at, text in parts
    )
    return [replace(drafted, finish_reason=None), replace(own, accepted=0)]
