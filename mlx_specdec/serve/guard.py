"""Who may send requests, and a line in the log for each request."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Collection
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem

PUBLIC = ("/health", "/v1/health")


PAGE = (("GET", "/"), ("HEAD", "/"))
"""It says nothing of what is served, and asks for the key."""


WATCHED = (*PUBLIC, "/metrics")


LOOPBACK = ("localhost", "127.0.0.1", "::1")


log = logging.getLogger(__name__)


def error_response(problem: Problem) -> JSONResponse:
    """A problem as an answer."""
    return JSONResponse(problem.as_dict(), problem.status, problem.headers)


class Guard:
    """Lets in who has the key, and what no foreign page has sent.

    key: None lets everybody in. origins: pages that may ask, beside those of this server.
    loopback_name: as Access has it.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        origins: Collection[str],
        loopback_name: str | None = None,
    ) -> None:
        self._app = app
        self._key = None if key is None else key.encode("utf-8", "surrogateescape")
        self._origins = origins
        self._names: frozenset[str | None] | None = None
        if loopback_name is not None and "*" not in origins:
            named = (urlsplit(origin).hostname for origin in origins)
            self._names = frozenset(["localhost", loopback_name.lower(), *named])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await error_response(problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if not self._is_ours(headers.get("host", "")):
            error = (
                "the Host header names neither this machine nor an address: ask at localhost, or "
                "start the server with --host NAME or --cors-origin http://NAME"
            )
            return Problem(403, error, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not self._may_ask(origin, headers.get("host", "")):
            told = "pages of this origin may not ask this server: start it with --cors-origin"
            return Problem(403, told, code="origin_not_allowed")
        asked = (scope["method"], scope["path"])
        public = scope["path"] in PUBLIC or asked in PAGE or scope["method"] == "OPTIONS"
        if self._key is None or public:
            return None
        if hmac.compare_digest(_key_of(headers), self._key):
            return None
        told = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        return Problem(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header can come from a page or program of this machine's user. A foreign
        page reaches a server on loopback by a DNS name of its own that resolves to 127.0.0.1; it
        can do so neither with an address nor with names that no public DNS has."""
        if self._names is None or not host:
            return True
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return (
            name in self._names
            or _is_address(name)
            or (name or "").endswith((".localhost", ".internal"))
        )

    def _may_ask(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        # A page of this very server; a name that somebody made point here is none of its own.
        try:
            page = urlsplit(origin)
        except ValueError:
            return False
        return page.netloc == host and (page.hostname in LOOPBACK or _is_address(page.hostname))


def _is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True


def _key_of(headers: Headers) -> bytes:
    given = headers.get("authorization", "")
    kind, _, key = given.partition(" ")
    told = key.strip(" \t") if kind.lower() == "bearer" else headers.get("x-api-key", "")
    return told.encode("latin-1")  # as starlette decodes headers


class AccessLog:
    """Writes who asked for what, how it ended, and what it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        # Those who watch a server ask every few seconds.
        level = logging.DEBUG if scope.get("path") in WATCHED else logging.INFO
        if scope["type"] != "http" or not log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | str = "none"

        async def listen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["told"] = {}
        try:
            await self._app(scope, receive, listen)
        except Exception:
            if status == "none":
                status = 500  # Starlette's answer, sent when all middleware has been left
            raise
        finally:
            client = (scope.get("client") or ("unknown",))[0]
            seconds = time.perf_counter() - started
            more = "".join(f" {name}={value}" for name, value in scope["told"].items())
            log.log(
                level,
                "client=%s method=%s path=%s status=%s seconds=%.3f%s",
                client,
                quote(scope["method"]),
                quote(scope["path"]),
                status,
                seconds,
                more,
            )


def tell(request: Request, **told: object) -> None:
    """More for the line in the log."""
    request.scope.get("told", {}).update(told)
