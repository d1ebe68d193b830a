"""The application: all endpoints, their OpenAPI document, who may send requests, and the log."""

import functools
import hashlib
import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..version import __version__
from . import anthropic, llama_cpp, openai, responses, tgi
from .answers import Payload
from .body import OBJECT, TEXT, WHOLE, Schema, either, named, several
from .problems import Problem, failed
from .service import EVENTS, JSON, Endpoint, Service, error_response

STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503)
PUBLIC = ("/health", "/v1/health")
PAGE = (("GET", "/"), ("HEAD", "/"))
"""The page asks for the key itself."""
WATCHED = (*PUBLIC, "/metrics")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page sends requests to this server alone, and no other page may have it in a frame."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """Who may send requests. keys: any of them; without one all may. origins: web pages
    that may. loopback_name: the loopback host that the server listens on, which Host headers are
    checked against; None takes any Host header."""

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    loopback_name: str | None = None


def make_app(service: Service, access: Access) -> Starlette:
    """Return the application around a service."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=access.origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
    )
    between = [cors] if access.origins else []
    middleware = [Middleware(AccessLog), *between, Middleware(Guard, access)]
    handlers: dict[Any, Any] = {
        HTTPException: _of_starlette,
        ClientDisconnect: lambda request, problem: Response(status_code=499),
        Exception: lambda request, problem: error_response(failed("something went wrong here")),
    }
    return Starlette(
        routes=[
            Route(path, functools.partial(service.respond, each), methods=[each.method])
            for each in ENDPOINTS
            # Clients leave out either.
            for path in dict.fromkeys((each.path, each.path.removeprefix("/v1")))
        ],
        middleware=middleware,
        exception_handlers=handlers,
    )


def _of_starlette(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    headers = dict(problem.headers or {})
    if problem.status_code == 405:
        # Starlette names only the methods of the first route with this path.
        fitting = [each for each in request.app.routes if each.matches(request.scope)[0].value]
        headers["Allow"] = ", ".join(sorted(set().union(*(each.methods for each in fitting))))
    messages = {
        404: "nothing is served at this path: /openapi.json lists what is",
        405: f"this path does not take {request.method:.20}: use {headers.get('Allow')}",
    }
    message = messages.get(problem.status_code, problem.detail)
    return error_response(Problem(problem.status_code, message, headers=headers))


def page(service: Service, request: Request) -> Response:
    """Return a page with a chat for a browser."""
    return FileResponse(Path(__file__).with_name("page.html"), headers=PAGE_HEADERS)


def openapi(service: Service, request: Request) -> Payload:
    """Return the OpenAPI 3.1 document of all endpoints, with their bodies and answers."""
    schemas = service.parser().schemas
    paths: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        operations = paths.setdefault(endpoint.path.replace(":path", ""), {})
        for name, schema in (("id", {"enum": [service.name]}), ("response_id", TEXT)):
            if f"{{{name}" in endpoint.path:
                parameter = {"name": name, "in": "path", "required": True, "schema": schema}
                operations["parameters"] = [parameter]
        operations[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-specdec", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **_answers()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> Schema:
    content: Schema = {endpoint.media: {"schema": _ref(endpoint.answer)}}
    body: Schema = {}
    if endpoint.body:
        content[EVENTS] = {"schema": {}}
        schema = {"schema": _ref(endpoint.body)}
        body = {"requestBody": {"required": True, "content": {JSON: schema}}}
    error = {JSON: {"schema": _ref("Error")}}
    why = {"description": "Why there is none", "content": error}
    responses = {"200": {"description": "The answer", "content": content}}
    responses |= dict.fromkeys(map(str, STATUSES), why)
    return {"summary": endpoint.summary, **body, "responses": responses}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers() -> dict[str, Schema]:
    """Return the schemas of answers, as far as clients rely on them."""
    choice = _answer(index=WHOLE, finish_reason={"enum": ["stop", "length", "tool_calls"]})
    usage = _answer(**named("prompt_tokens completion_tokens total_tokens", WHOLE))
    return {
        "Completion": _answer(
            **named("id model", TEXT),
            object={"enum": ["chat.completion", "text_completion"]},
            created=WHOLE,
            choices=several(choice, 1),
            usage=usage,
        ),
        "Message": _answer(
            **named("id model stop_reason", TEXT),
            type={"const": "message"},
            role={"const": "assistant"},
            content=several(_answer(type=TEXT)),
            usage=_answer(input_tokens=WHOLE, output_tokens=WHOLE),
        ),
        "Response": _answer(
            **named("id model", TEXT),
            object={"const": "response"},
            status={"enum": ["completed", "incomplete"]},
            output=several(_answer(**named("id type status", TEXT)), 1),
            usage=_answer(**named("input_tokens output_tokens total_tokens", WHOLE)),
        ),
        "Count": _answer(input_tokens=WHOLE),
        "Generated": _answer(generated_text=TEXT),
        "AnyGenerated": several(_answer(generated_text=TEXT), 1, 1),
        "Tokens": _answer(tokens=several(WHOLE), count=WHOLE, max_model_len=WHOLE),
        "Detokenized": _answer(content=TEXT, prompt=TEXT),
        "Models": _answer(object={"const": "list"}, data=several(_ref("Model"), 1)),
        "Model": _answer(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT),
        "Text": TEXT,
        "Anything": OBJECT,
        "Error": _answer(error=either(_answer(message=TEXT, type=TEXT), TEXT)),
    }


def _answer(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of these fields."""
    return {"type": "object", "properties": properties, "required": list(properties)}


ENDPOINTS = (
    *(*openai.ENDPOINTS, *responses.ENDPOINTS, *anthropic.ENDPOINTS),
    *(*tgi.ENDPOINTS, *llama_cpp.ENDPOINTS),
    Endpoint("/", page, "Text", "A chat for a browser", media="text/html"),
    Endpoint("/openapi.json", openapi, "Anything", "This document"),
)


class Guard:
    """Refuses requests without a key and those that a foreign web page sends. Names the tenant of
    the others, by a digest of the key that they were sent with."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._keys = [key.encode("utf-8", "surrogateescape") for key in access.keys]
        self._origins = frozenset(access.origins)
        self._checks_host = access.loopback_name is not None and "*" not in access.origins
        named = (urlsplit(origin).hostname for origin in access.origins)
        self._names = {"localhost", (access.loopback_name or "localhost").lower(), *named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if scope["type"] == "http":
            key = _key_of(Headers(scope=scope))
            scope["tenant"] = hashlib.sha256(key).hexdigest() if key else ""
        answer = self._app if problem is None else error_response(problem)
        await answer(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        local = self._is_local(host)
        if self._checks_host and host and not local:
            error = (
                "the Host header names neither this machine nor an address: ask at localhost, or "
                "start the server with --host NAME or --cors-origin http://NAME"
            )
            return Problem(403, error, code="host_not_allowed")
        # Pages of this server may send requests.
        of_this_server = local and (origin or "").partition("://")[2] == host
        if origin is not None and not self._origins & {origin, "*"} and not of_this_server:
            error = "pages of this origin may not ask this server: start it with --cors-origin"
            return Problem(403, error, code="origin_not_allowed")
        method, path = scope["method"], scope["path"]
        public = path in PUBLIC or (method, path) in PAGE or method == "OPTIONS"
        given = _key_of(headers)
        known = [hmac.compare_digest(given, key) for key in self._keys]
        if any(known) or not known or public:
            return None
        error = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        return Problem(401, error, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_local(self, host: str) -> bool:
        """Return True for a Host header that a foreign web page cannot have: such a page reaches
        this server by a name of the public DNS."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            local = name in self._names or name.endswith((".localhost", ".internal"))
            return local or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _key_of(headers: Headers) -> bytes:
    given = headers.get("authorization", "")
    kind, _, key = given.partition(" ")
    key = key.strip(" \t") if kind.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")  # as starlette decodes headers


class AccessLog:
    """Logs a line for each request: client, path, status, seconds and numbers of tokens. Gives each
    answer an id, under the names that OpenAI's and Anthropic's clients read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Monitoring asks for these every few seconds.
        level = logging.DEBUG if scope.get("path") in WATCHED else logging.INFO
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, fields = time.perf_counter(), scope.setdefault("log_fields", {})
        id = f"req_{uuid.uuid4().hex}"
        status = 500  # Starlette's answer to an exception, sent when all middleware has been left

        async def listen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update({"x-request-id": id, "request-id": id})
            await send(message)

        try:
            await self._app(scope, receive, listen)
        finally:
            client = (scope.get("client") or ("unknown",))[0]
            line = f"client={client} method={quote(scope['method'])} path={quote(scope['path'])}"
            line += f" status={status} seconds={time.perf_counter() - started:.3f}"
            fields["request"] = id
            log.log(level, " ".join([line, *(f"{name}={fields[name]}" for name in fields)]))
