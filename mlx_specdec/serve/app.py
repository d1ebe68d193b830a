"""The application: all routes, who may send requests, the limits of bodies, and the log."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import Collection, Sequence
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
from . import anthropic, llama_cpp, ollama, openai, responses, tgi
from .fields import BODY_BYTES, parse, problem_of
from .problems import Problem, busy, failed
from .registry import Registry
from .service import Writer, registry_of

PUBLIC = ("/health", "/v1/health")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page may send requests only to this server, and no other page may show it in a frame."""
WRITERS = (anthropic.MessagesWriter, ollama.OllamaWriter, responses.ResponsesWriter, tgi.TgiWriter)
ERRORS = {writer.__module__: writer.error for writer in WRITERS}
"""Module of a route -> the function that writes its errors. Other routes have OpenAI's errors."""
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


def make_app(registry: Registry, access: Access) -> FastAPI:
    """Return the application around the models."""
    methods = ["GET", "POST", "DELETE"]
    cors = Middleware(CORSMiddleware, access.origins, allow_methods=methods, allow_headers=["*"])
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
        middleware=[Middleware(logged), *between, Middleware(guarded, access), Middleware(limited)],
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"description": "Refused"}, "5XX": {"description": "Failed"}},
        dependencies=[Security(HTTPBearer(auto_error=False, scheme_name="key"))],
    )
    app.state.registry = registry
    # Some clients omit "/v1" from paths.
    modules = anthropic, openai, responses
    for router in (*(module.router for module in modules), llama_cpp.v1):
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    for router in (tgi.router, llama_cpp.router, ollama.router):
        app.include_router(router)
    app.get("/", summary="A chat for a browser", response_class=FileResponse)(page)
    return app


def error_response(problem: Problem, http: Request | None = None) -> Response:
    """Return an error in the format of a request's route, or in OpenAI's format without one."""
    route = None if http is None else http.scope.get("route")
    module = "" if route is None else route.endpoint.__module__
    status, payload = ERRORS.get(module, Writer.error)(problem)
    return JSONResponse(payload, status, problem.headers)


def _of_validation(http: Request, error: RequestValidationError) -> Response:
    """Return an error for a wrong body. A wrong name of a model comes before it."""
    try:
        body = parse(error.body or b"{}")
        registry_of(http).find(body.get("model"))
        errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
        return error_response(problem_of(errors, body), http)
    except Problem as problem:
        return error_response(problem, http)


def _of_starlette(http: Request, problem: HTTPException) -> Response:
    headers, message = dict(problem.headers or {}), problem.detail
    if problem.status_code == 404:
        message = "nothing is served at this path: /openapi.json lists what is"
    if problem.status_code == 405:
        # Starlette names only the methods of the first route with this path. Every path that
        # answers GET requests also answers HEAD.
        found = set()
        for method in ("DELETE", "GET", "POST"):
            scope = {**http.scope, "method": method}
            if any(route.matches(scope)[0] is Match.FULL for route in http.app.routes):
                found |= {method, "HEAD"} if method == "GET" else {method}
        headers["Allow"] = ", ".join(sorted(found))
        message = f"this path does not take {http.method:.20}: use {headers['Allow']}"
    return error_response(Problem(problem.status_code, message, headers=headers))


async def page() -> Response:
    return FileResponse(Path(__file__).with_name("page.html"), headers=PAGE_HEADERS)


def limited(app: ASGIApp) -> ASGIApp:
    """Return an application with a limit of bodies, and of the time for a request. It hides the
    type of a body, so that FastAPI hands its bytes to the models, which read them."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        seconds, size = registry_of(Request(scope)).first.settings.seconds, 0
        coding = Headers(scope=scope).get("content-encoding", "identity")
        scope["headers"] = [field for field in scope["headers"] if field[0] != b"content-type"]

        async def bounded() -> Message:
            nonlocal size
            if coding != "identity":
                message = f"a body with the content encoding {coding:.20} is not read"
                raise Problem(415, f"{message}: send it plainly")
            part = await receive()
            size += len(part.get("body", b""))
            if size > BODY_BYTES:
                raise Problem(413, f"the body has more than {BODY_BYTES} bytes: shorten it")
            return part

        try:
            async with asyncio.timeout(seconds) as scope["limit"]:
                await app(scope, bounded, send)
        except TimeoutError:
            problem = busy("the time of this request was over: try again later", code="timeout")
            await error_response(problem, Request(scope))(scope, receive, send)

    return answer


def guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Return an application that refuses requests without a key and requests of foreign web pages.
    It sets the tenant of other requests, which is a digest of the key."""
    keys = [key.encode("utf-8", "surrogateescape") for key in access.keys]
    checks_host = access.loopback_name is not None and "*" not in access.origins
    named = (urlsplit(origin).hostname for origin in access.origins)
    names = {"localhost", (access.loopback_name or "localhost").lower(), *named}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        host, origin = headers.get("host", ""), headers.get("origin")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = bearer.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        key = sent.encode("latin-1")  # as starlette decodes headers
        scope["tenant"] = hashlib.sha256(key).hexdigest() if key else ""
        local, problem = _is_local(host, names), None
        # The page at / asks for the key itself.
        public = path in PUBLIC or (method, path) == ("GET", "/") or method == "OPTIONS"
        # Pages of this server may send requests.
        ours = local and origin is not None and origin.partition("://")[2] == host
        if checks_host and host and not local:
            error = (
                "the Host header names neither this machine nor an address: ask at localhost, or "
                "start the server with --host NAME or --cors-origin http://NAME"
            )
            problem = Problem(403, error, code="host_not_allowed")
        elif not (ours or origin is None or {origin, "*"} & {*access.origins}):
            error = "pages of this origin may not ask this server: start it with --cors-origin"
            problem = Problem(403, error, code="origin_not_allowed")
        elif keys and not (public or sum(hmac.compare_digest(key, one) for one in keys)):
            error = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            authenticate = {"WWW-Authenticate": "Bearer"}
            problem = Problem(401, error, code="invalid_api_key", headers=authenticate)
        await (app if problem is None else error_response(problem))(scope, receive, send)

    return answer


def _is_local(host: str, names: Collection[str | None]) -> bool:
    """Return whether a Host header cannot come from a foreign web page, which would reach this
    server by a name in the public DNS."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        local = name in names or name.endswith((".localhost", ".internal"))
        return local or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def logged(app: ASGIApp) -> ASGIApp:
    """Return an application that logs a line for each request: client, path, status, seconds and
    numbers of tokens. It adds an id to each answer, in the headers of OpenAI's and of Anthropic's
    API."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Monitoring requests these paths every few seconds.
        level = logging.DEBUG if scope["path"] in (*PUBLIC, "/metrics") else logging.INFO
        if scope["method"] == "HEAD":
            # Every path that answers GET requests also answers HEAD.
            scope = {**scope, "method": "GET"}
        started, id = time.perf_counter(), f"req_{uuid.uuid4().hex}"
        status = 500  # After an exception, Starlette sends 500 outside of all middleware.
        # A handler puts a function here that ends its work and returns numbers of tokens.
        scope["end"] = dict

        async def listen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({"x-request-id": id, "request-id": id})
            await send(message)

        try:
            await app(scope, receive, listen)
        finally:
            client, seconds = scope.get("client") or ("unknown",), time.perf_counter() - started
            line = f"client={client[0]} method={quote(scope['method'])} path={quote(scope['path'])}"
            counts = "".join(f" {name}={count}" for name, count in scope["end"]().items())
            log.log(level, f"{line} status={status} seconds={seconds:.3f}{counts} request={id}")

    return answer
