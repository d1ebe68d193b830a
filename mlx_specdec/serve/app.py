"""The application: all endpoints, their OpenAPI document, who may send requests, and the log."""

import functools
import hashlib
import hmac
import inspect
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..version import __version__
from . import answer_models, anthropic, embeddings, llama_cpp, ollama, openai, responses, tgi
from .problems import Problem, failed
from .service import Endpoint, Service, error_response

STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503)
PUBLIC = ("/health", "/v1/health")
PAGE = (("GET", "/"), ("HEAD", "/"))
"""The page asks for the key itself."""
MONITORED_PATHS = (*PUBLIC, "/metrics")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page may send requests only to this server, and no other page may show it in a frame."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """Access control.

    Attributes:
        keys: API keys. A request needs one of them, unless there are none.
        origins: Origins of web pages that may send requests.
        loopback_name: The loopback host that the server listens on, or None to accept any Host.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    loopback_name: str | None = None


def make_app(service: Service, access: Access) -> FastAPI:
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
    app = FastAPI(
        title="mlx-specdec",
        version=__version__,
        middleware=middleware,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
        dependencies=[Security(HTTPBearer(auto_error=False, scheme_name="key"))],
        responses={status: {"model": answer_models.ErrorAnswer} for status in STATUSES},
    )
    for endpoint in ENDPOINTS:
        _add(app, service, endpoint)
    return app


def _add(app: FastAPI, service: Service, endpoint: Endpoint) -> None:
    """Add the routes of an endpoint. FastAPI describes them in /openapi.json, but the service reads
    the bodies, since FastAPI has no limits of size and time."""

    class Served(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            return functools.partial(service.respond, endpoint)

    answers: dict[int | str, dict[str, Any]] = {}
    if endpoint.answer is None:
        answers[200] = {"content": {endpoint.media: {"schema": {"type": "string"}}}}
    elif endpoint.body is not None:
        answers[200] = {"content": {endpoint.streams: {}}}
    # Some clients omit "/v1" from paths. Every path that answers GET requests also answers HEAD.
    paths = dict.fromkeys((endpoint.path, endpoint.path.removeprefix("/v1")))
    for path in paths:
        for method in (endpoint.method, *(("HEAD",) if endpoint.method == "GET" else ())):
            app.router.add_api_route(
                path,
                _signature(endpoint),
                methods=[method],
                response_model=endpoint.answer,
                response_class=JSONResponse if endpoint.answer is not None else PlainTextResponse,
                responses=answers,
                summary=endpoint.summary,
                include_in_schema=path == endpoint.path and method == endpoint.method,
                route_class_override=Served,
            )


def _signature(endpoint: Endpoint) -> Callable[..., None]:
    """Return a function with the parameters of an endpoint, for FastAPI's description."""

    def answer(**parameters: Any) -> None: ...

    names: dict[str, Any] = dict.fromkeys(re.findall(r"{(\w+)", endpoint.path), str)
    if endpoint.body is not None:
        names["body"] = endpoint.body
    kind = inspect.Parameter.KEYWORD_ONLY
    answer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in names.items()]
    )
    answer.__name__ = re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_")
    return answer


def _of_starlette(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    headers = dict(problem.headers or {})
    if problem.status_code == 405:
        # Starlette names only the methods of the first route with this path.
        fitting = [route for route in request.app.routes if route.matches(request.scope)[0].value]
        headers["Allow"] = ", ".join(sorted(set().union(*(route.methods for route in fitting))))
    messages = {
        404: "nothing is served at this path: /openapi.json lists what is",
        405: f"this path does not take {request.method:.20}: use {headers.get('Allow')}",
    }
    message = messages.get(problem.status_code, problem.detail)
    return error_response(Problem(problem.status_code, message, headers=headers))


def page(service: Service, request: Request) -> Response:
    """Return a page with a chat for a browser."""
    return FileResponse(Path(__file__).with_name("page.html"), headers=PAGE_HEADERS)


ENDPOINTS = (
    *(*openai.ENDPOINTS, *responses.ENDPOINTS, *anthropic.ENDPOINTS),
    *(*embeddings.ENDPOINTS, *tgi.ENDPOINTS, *llama_cpp.ENDPOINTS, *ollama.ENDPOINTS),
    Endpoint("/", page, None, "A chat for a browser", media="text/html"),
)


class Guard:
    """Middleware that refuses requests without a key and requests of foreign web pages. It sets the
    tenant of other requests, which is a digest of the key."""

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
        sent = _key_of(headers)
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        if any(matches) or not matches or public:
            return None
        error = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        return Problem(401, error, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_local(self, host: str) -> bool:
        """Return whether a Host header cannot come from a foreign web page, which would reach this
        server by a name in the public DNS."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            local = name in self._names or name.endswith((".localhost", ".internal"))
            return local or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _key_of(headers: Headers) -> bytes:
    header = headers.get("authorization", "")
    kind, _, key = header.partition(" ")
    key = key.strip(" \t") if kind.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")  # as starlette decodes headers


class AccessLog:
    """Middleware that logs a line for each request: client, path, status, seconds and numbers of
    tokens. It adds an id to each answer, in the headers of OpenAI's and of Anthropic's API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Monitoring requests these paths every few seconds.
        level = logging.DEBUG if scope.get("path") in MONITORED_PATHS else logging.INFO
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, fields = time.perf_counter(), scope.setdefault("log_fields", {})
        id = f"req_{uuid.uuid4().hex}"
        status = 500  # After an exception, Starlette sends 500 outside of all middleware.

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
