"""The routes: asynchronous, around an engine that is not. No handler touches an array."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..errors import SpecdecError
from ..text.vocabulary import token_bytes
from . import body as fields
from . import messages, tgi
from .asked import Asked, Asking, unknown_model
from .body import Body
from .chat import messages_of, way_of
from .engine import Engine
from .guard import AccessLog, Guard, error_response, tell
from .limits import Limits
from .messages import MessagesWire
from .metrics import CONTENT_TYPE
from .problems import Problem, busy, failed, wrong
from .talk import Talk
from .tgi import TgiWire
from .wire import KEEP_ALIVE, ChatWire, TextWire, Told, event
from .wire import Wire as OpenAIWire

PING_SECONDS = 15.0
"""After which a stream that has nothing to say says so, for the proxies on its way."""
SLOWEST_READER = 60.0
"""Seconds that a client has to read a stream, beyond the time of its request."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


Wire = OpenAIWire | TgiWire | MessagesWire


@dataclass(frozen=True)
class Access:
    """Who may ask. key: None lets everybody in. origins: pages of browsers that may."""

    key: str | None = None
    origins: Sequence[str] = ()


class Service:
    """What the routes do. name: of the model, as clients see it. drawn_seeds: a request without a
    seed gets one of its own, and not that of the options."""

    def __init__(
        self, engine: Engine, name: str, limits: Limits, *, drawn_seeds: bool = True
    ) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._drawn_seeds = drawn_seeds
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All of them."""
        post, get = ["POST"], ["GET"]
        return [
            Route("/health", self.health, methods=get),
            Route("/v1/health", self.health, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/props", self.props, methods=get),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{id:path}", self.model, methods=get),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/messages", self.messages, methods=post),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=post),
            Route("/", self.generate, methods=post),
            Route("/generate", self.generate, methods=post),
            Route("/generate_stream", self.generate, methods=post),
            Route("/info", self.info, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
        ]

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        self._asking()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Everything that is counted."""
        text = self._engine.metrics.as_text(self._name, *self._engine.requests)
        return Response(text, media_type=CONTENT_TYPE)

    async def props(self, request: Request) -> Response:
        """What is served, and how."""
        asking = self._asking()
        pair, options, limits = asking.pair, asking.options, self._limits
        return JSONResponse(
            {
                "model_alias": self._name,
                "total_slots": self._engine.batch_size,
                "n_ctx": asking.longest,
                "chat": way_of(pair, options),
                "rule": options.rule_name,
                "lossy": options.lossy,
                "num_draft": 0 if options.regular else options.num_draft,
                "has_draft_model": pair.draft is not None,
                "default_generation_settings": {
                    "max_tokens": options.max_tokens,
                    "temperature": options.temperature,
                    "top_p": options.top_p,
                    "top_k": options.top_k,
                    "min_p": options.min_p,
                    "seed": None if self._drawn_seeds else options.seed,
                },
                "limits": {
                    "body_bytes": limits.body_bytes,
                    "waiting": limits.waiting,
                    "seconds": limits.seconds,
                    "choices": limits.choices,
                    "stops": limits.stops,
                },
                "build_info": _fingerprint(),
            }
        )

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, if that is the one."""
        if request.path_params["id"] != self._name:
            raise unknown_model(request.path_params["id"], self._name)
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text (`content`, or vLLM's `prompt`) or of messages."""
        asking, body = self._asking(), await self._body(request)

        def read() -> list[int]:
            asking.check_model(body)
            if "messages" in body:
                return asking.chat_ids(messages_of(body["messages"]), {})
            return asking.text_ids(fields.text(body, "content" if "content" in body else "prompt"))

        ids = await _outside(read)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": asking.longest})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones left out."""
        asking, body = self._asking(), await self._body(request)
        ids, size = body.get("tokens"), asking.pair.tokenizer.size
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise wrong("tokens must be a list of token ids", "tokens")
        if not all(0 <= each < size for each in ids):
            raise wrong(f"token ids lie between 0 and {size - 1}", "tokens")
        text = await _outside(lambda: asking.pair.tokenizer.decode(ids))
        return JSONResponse({"content": text, "prompt": text})

    async def chat(self, request: Request) -> Response:
        """Answer messages."""
        return await self._openai(request, Asking.chat, ChatWire)

    async def completions(self, request: Request) -> Response:
        """Go on with a text."""
        return await self._openai(request, Asking.completions, TextWire)

    async def messages(self, request: Request) -> Response:
        """Answer messages, for Anthropic's clients."""
        try:
            asking, body = self._asking(), await self._body(request)
            asked = await _outside(lambda: messages.ask(asking, body))
            wire = MessagesWire(self._name, body, asked)
            return _told(await self._answer(request, asked, wire))
        except Problem as problem:
            return JSONResponse(messages.error(problem), problem.status, problem.headers)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens messages have."""
        try:
            asking, body = self._asking(), await self._body(request)
            given = await _outside(lambda: messages_of(messages.messages(body)))
            ids = await _outside(lambda: asking.chat_ids(given, {}))
            return JSONResponse({"input_tokens": len(ids)})
        except Problem as problem:
            return JSONResponse(messages.error(problem), problem.status, problem.headers)

    async def generate(self, request: Request) -> Response:
        """TGI's /generate, /generate_stream and /, which does what the body asks for."""
        path = request.url.path
        try:
            asking, body = self._asking(), await self._body(request)
            if path != "/":
                body = {**body, "stream": path == "/generate_stream"}
            asked = await _outside(lambda: tgi.ask(asking, body))
            pieces = await _outside(lambda: self._pieces)
            wire = tgi.TgiWire(body, asked, pieces, asking.pair.tokenizer.special_ids)
            answer = await self._answer(request, asked, wire)
        except Problem as problem:
            status, told = tgi.error(problem)
            return JSONResponse(told, status, problem.headers)
        return JSONResponse([answer]) if path == "/" and isinstance(answer, dict) else _told(answer)

    async def info(self, request: Request) -> Response:
        """What TGI's clients want to know."""
        asking, limits = self._asking(), self._limits
        return JSONResponse(
            {
                "model_id": self._name,
                "model_dtype": asking.pair.dtype,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": self._engine.batch_size + limits.waiting,
                "max_best_of": 1,
                "max_stop_sequences": limits.stops,
                "max_input_tokens": asking.longest - 1,
                "max_total_tokens": asking.longest,
                "version": __version__,
                "router": "mlx-specdec",
            }
        )

    async def _openai(
        self, request: Request, ask: Callable[[Asking, Body], Asked], kind: type[OpenAIWire]
    ) -> Response:
        asking, body = self._asking(), await self._body(request)
        asked = await _outside(lambda: ask(asking, body))
        logprobs = any(each.top_logprobs is not None for each in asked.requests)
        pieces = await _outside(lambda: self._pieces) if logprobs else ()
        return _told(await self._answer(request, asked, kind(self._name, _fingerprint(), pieces)))

    async def _answer(self, request: Request, asked: Asked, wire: Wire) -> Response | Told:
        """A stream, or the whole answer. Raises Problem."""
        talk = Talk(self._engine, asked, self._limits.seconds)
        if asked.stream:
            events = _events(talk, wire, asked)
            return EventStream(events, lambda: _end(request, talk, asked), self._limits.seconds)
        try:
            await _while_there(request, _all(talk))
        finally:
            _end(request, talk, asked)
        return wire.answer(talk.choices, asked.prompt_tokens)

    @functools.cached_property
    def _pieces(self) -> list[bytes | None]:
        """The bytes that each token id stands for."""
        return token_bytes(self._engine.pair.tokenizer)

    def _asking(self) -> Asking:
        """Raises Problem while the models are being loaded."""
        if not self._engine.ready.is_set():
            raise busy("Loading model", code="loading")
        engine = self._engine
        return Asking(engine.pair, engine.options, self._limits, self._name, self._drawn_seeds)

    async def _body(self, request: Request) -> Body:
        """Raises Problem for one that is too large, too slow or no JSON."""
        most, data = self._limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise Problem(413, f"the body has more than {most} bytes: shorten it")
        except TimeoutError:
            raise Problem(408, "the body took too long to come") from None
        return await _outside(lambda: fields.parse(bytes(data)))

    def _model(self) -> dict[str, Any]:
        told = {"id": self._name, "object": "model", "created": self._created}
        return {**told, "owned_by": "mlx-specdec"}


def make_app(service: Service, access: Access) -> Starlette:
    """The application around a service."""
    middleware = [Middleware(AccessLog)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(Guard, key=access.key, origins=frozenset(access.origins)))
    handlers: dict[Any, Any] = {
        Problem: lambda request, problem: error_response(problem),
        HTTPException: _of_starlette,
        ClientDisconnect: lambda request, problem: Response(status_code=499),
        Exception: lambda request, problem: error_response(failed("something went wrong here")),
    }
    return Starlette(routes=service.routes(), middleware=middleware, exception_handlers=handlers)


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
            for told in wire.piece(index, choice, emission):
                yield told
            for told in wire.end(index, choice) if ended[index] else ():
                yield told
    except Problem as problem:
        yield wire.error(problem)
        return
    cut = [each for each, over in enumerate(ended) if not over]
    for told in itertools.chain(*(wire.end(index, talk.choices[index]) for index in cut)):
        yield told
    for told in wire.rest(talk.choices, asked):
        yield told


def _told(answer: Response | Told) -> Response:
    return answer if isinstance(answer, Response) else JSONResponse(answer)


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


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _outside(work: Callable[[], Any]) -> Any:
    """Outside the event loop, what reads texts. Raises Problem."""
    try:
        return await run_in_threadpool(work)
    except SpecdecError as problem:
        raise wrong(str(problem)) from None


def _of_starlette(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    told = {404: "there is nothing here", 405: "this takes another method"}
    message = told.get(problem.status_code, problem.detail)
    return error_response(Problem(problem.status_code, message, headers=problem.headers))


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


def _fingerprint() -> str:
    return f"mlx-specdec-{__version__}"
