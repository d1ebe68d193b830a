"""What stands around the application: who may ask, and a line in the log for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .about import About
from .completions import Completions
from .guard import AccessLog, Guard, error_response
from .problems import Problem, failed
from .service import Service


@dataclass(frozen=True)
class Access:
    """Who may ask. key: None lets everybody in. origins: pages of browsers that may. loopback_name:
    the host that the server listens on where that is a loopback address; Host headers must then
    name this machine or an address. None takes any Host header."""

    key: str | None = None
    origins: Sequence[str] = ()
    loopback_name: str | None = None


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
    origins = frozenset(access.origins)
    middleware.append(
        Middleware(Guard, key=access.key, origins=origins, loopback_name=access.loopback_name)
    )
    handlers: dict[Any, Any] = {
        Problem: lambda request, problem: error_response(problem),
        HTTPException: _of_starlette,
        ClientDisconnect: lambda request, problem: Response(status_code=499),
        Exception: lambda request, problem: error_response(failed("something went wrong here")),
    }
    return Starlette(
        routes=[*About(service).routes(), *Completions(service).routes()],
        middleware=middleware,
        exception_handlers=handlers,
    )


def _of_starlette(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    headers = dict(problem.headers or {})
    if problem.status_code == 405:
        # Starlette names the methods of the first route alone that has this path.
        fitting = [each for each in request.app.routes if each.matches(request.scope)[0].value]
        headers["Allow"] = ", ".join(sorted(set().union(*(each.methods for each in fitting))))
    messages = {
        404: "nothing is served at this path: /openapi.json lists what is",
        405: f"this path does not take {request.method:.20}: use {headers.get('Allow')}",
    }
    message = messages.get(problem.status_code, problem.detail)
    return error_response(Problem(problem.status_code, message, headers=headers))
