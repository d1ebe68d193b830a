"""Routes that write texts, for the clients of three kinds of servers."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import messages, tgi
from .answers import Wire, answer, as_response
from .body import Body
from .messages import MessagesWire
from .problems import Problem
from .requests import Asked, Asking
from .service import FINGERPRINT, Service, outside
from .wire import ChatWire, TextWire, Told
from .wire import Wire as OpenAIWire


class Completions:
    """Handlers around a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        paths = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/": self.generate,
            "/generate": self.generate,
            "/generate_stream": self.generate,
        }
        return [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]

    async def chat(self, request: Request) -> Response:
        """Answer messages."""
        return await self._openai(request, Asking.chat, ChatWire)

    async def completions(self, request: Request) -> Response:
        """Go on with a text."""
        return await self._openai(request, Asking.completions, TextWire)

    async def messages(self, request: Request) -> Response:
        """Answer messages, for Anthropic's clients."""
        try:
            asking, body = self._service.asking(), await self._service.body(request)
            asked = await outside(lambda: messages.ask(asking, body))
            wire = MessagesWire(self._service.name, asked)
            return await as_response(await self._answer(request, asked, wire))
        except Problem as problem:
            return JSONResponse(messages.error(problem), problem.status, problem.headers)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens messages have."""
        try:
            asking, body = self._service.asking(), await self._service.body(request)
            count = await outside(lambda: messages.count(asking, body))
            return JSONResponse({"input_tokens": count})
        except Problem as problem:
            return JSONResponse(messages.error(problem), problem.status, problem.headers)

    async def generate(self, request: Request) -> Response:
        """TGI's /generate, /generate_stream and /, which does what the body asks for."""
        path = request.url.path
        try:
            asking, body = self._service.asking(), await self._service.body(request)
            stream = None if path == "/" else path == "/generate_stream"
            asked = await outside(lambda: tgi.ask(asking, body, stream))
            pieces = await outside(lambda: self._service.pieces)
            wire = tgi.TgiWire(body, asked, pieces, asking.pair.tokenizer.special_ids)
            told = await self._answer(request, asked, wire)
        except Problem as problem:
            status, error = tgi.error(problem)
            return JSONResponse(error, status, problem.headers)
        return await as_response([told] if path == "/" and isinstance(told, dict) else told)

    async def _openai(
        self, request: Request, ask: Callable[[Asking, Body], Asked], kind: type[OpenAIWire]
    ) -> Response:
        asking, body = self._service.asking(), await self._service.body(request)
        asked = await outside(lambda: ask(asking, body))
        logprobs = any(each.top_logprobs is not None for each in asked.requests)
        pieces = await outside(lambda: self._service.pieces) if logprobs else ()
        service = self._service
        wire = kind(service.name, FINGERPRINT, asked, pieces, metrics=service.metrics)
        return await as_response(await self._answer(request, asked, wire))

    async def _answer(self, request: Request, asked: Asked, wire: Wire) -> Response | Told:
        service = self._service
        return await answer(service.engine, request, asked, wire, service.limits.seconds)
