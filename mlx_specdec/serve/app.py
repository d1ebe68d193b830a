"""The application: all routes, who may send requests, the limits of bodies, and the log."""

import asyncio
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

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..version import __version__
from . import anthropic, embeddings, llama_cpp, ollama, openai, responses, tgi
from .fields import parse, problem_of
from .problems import Problem, busy, failed
from .service import Service, service_of

MOST_LARGE = 4
"""Bodies of the largest size that may be received at the same time."""
SMALL_BODY = 1 << 16
"""Bytes of each body that do not count towards the limit of all bodies together."""
METHODS = ("DELETE", "GET", "POST")
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
ERRORS = {
    f"{prefix}{route.path}": module.error
    for module in (anthropic, ollama, responses, tgi)
    for route in module.router.routes
    for prefix in ("", "/v1")
}
"""The function that writes an error, by the path of a route. Other routes have OpenAI's errors."""
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
    handlers: dict[Any, Any] = {
        HTTPException: _of_starlette,
        Problem: lambda http, problem: error_response(problem, http),
        RequestValidationError: _of_validation,
        ClientDisconnect: lambda http, problem: Response(status_code=499),
        Exception: lambda http, problem: error_response(failed("something went wrong here")),
    }
    app = FastAPI(
        title="mlx-specdec",
        version=__version__,
        middleware=[Middleware(AccessLog), *between, Middleware(Guard, access), Middleware(Bodies)],
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
        dependencies=[Security(HTTPBearer(auto_error=False, scheme_name="key"))],
    )
    app.state.service = service
    # Some clients omit "/v1" from paths.
    for router in (
        *(openai.router, responses.router, anthropic.router),
        *(embeddings.router, llama_cpp.v1),
    ):
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    for router in (tgi.router, llama_cpp.router, ollama.router):
        app.include_router(router)
    app.get("/", summary="A chat for a browser", response_class=FileResponse)(page)
    return app


def error_response(problem: Problem, http: Request | None = None) -> Response:
    """Return an error in the format of a request's route, or in OpenAI's format without one."""
    route = None if http is None else http.scope.get("route")
    write = openai.error if route is None else ERRORS.get(route.path, openai.error)
    status, payload = write(problem)
    return JSONResponse(payload, status, problem.headers)


def _of_validation(http: Request, error: RequestValidationError) -> Response:
    """Return an error for a wrong body. A wrong name of a model comes before it."""
    try:
        body = parse(error.body or b"{}")
        service_of(http).registry.find(body.get("model"))
        errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
        problem = problem_of(errors, body)
    except Problem as found:
        problem = found
    return error_response(problem, http)


def _of_starlette(http: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    headers = dict(problem.headers or {})
    if problem.status_code == 405:
        # Starlette names only the methods of the first route with this path.
        scopes = {method: {**http.scope, "method": method} for method in METHODS}
        found = {
            method
            for method, scope in scopes.items()
            if any(route.matches(scope)[0] is Match.FULL for route in http.app.routes)
        }
        headers["Allow"] = ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))
    messages = {
        404: "nothing is served at this path: /openapi.json lists what is",
        405: f"this path does not take {http.method:.20}: use {headers.get('Allow')}",
    }
    message = messages.get(problem.status_code, problem.detail)
    return error_response(Problem(problem.status_code, message, headers=headers))


async def page() -> Response:
    """Return a page with a chat for a browser."""
    return FileResponse(Path(__file__).with_name("page.html"), headers=PAGE_HEADERS)


class Bodies:
    """Middleware with the limits of bodies, and of the time for a request. It hides the type of a
    body, so that FastAPI hands its bytes to the models, which read them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._large_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits, loop = scope["app"].state.service.limits, asyncio.get_running_loop()
        deadline = scope["deadline"] = loop.time() + limits.seconds
        coding = Headers(scope=scope).get("content-encoding", "identity")
        scope["headers"] = [field for field in scope["headers"] if field[0] != b"content-type"]
        size, large, complete = 0, 0, False

        async def limited() -> Message:
            nonlocal size, large, complete
            if complete:
                return await receive()
            if coding != "identity":
                message = (
                    f"a body with the content encoding {coding:.20} is not read: send it plainly"
                )
                raise Problem(415, message)
            try:
                async with asyncio.timeout_at(deadline):
                    part = await receive()
            except TimeoutError:
                raise Problem(408, "the body took too long to come") from None
            if part["type"] == "http.disconnect":
                raise Problem(499, "the client has left")
            complete = not part.get("more_body", False)
            size += len(part.get("body", b""))
            if size > limits.body_bytes:
                raise Problem(413, f"the body has more than {limits.body_bytes} bytes: shorten it")
            more = max(0, size - SMALL_BODY) - large
            if self._large_bytes + more > MOST_LARGE * limits.body_bytes:
                self._large_bytes, large = self._large_bytes - large, 0
                raise busy("too many large bodies come at once: try again", 429)
            self._large_bytes, large = self._large_bytes + more, large + more
            return part

        try:
            await self._app(scope, limited, send)
        finally:
            self._large_bytes -= large


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
        if scope["method"] == "HEAD":
            # Every path that answers GET requests also answers HEAD.
            scope = {**scope, "method": "GET"}
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
