"""Connections on which clients are silent: who waits for whom, and who is let go."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mlx_specdec.serve import server
from mlx_specdec.serve.server import Connection

from ..support.serving import wait_until

PATIENCE = 60.0
LARGE = 16 << 20
GET = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = GET.replace(b"small", b"slow")


@dataclass(frozen=True)
class Place:
    """A server and its address. end: lets the answer at /slow end. kind: of its connections."""

    server: uvicorn.Server
    address: tuple[str, int]
    end: threading.Event
    kind: Any


async def small(request: Request) -> Response:
    return PlainTextResponse("small")


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * LARGE)


async def body(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


@contextmanager
def listening(
    *, head_seconds: float = PATIENCE, stall_seconds: float = PATIENCE, most: int = 1000
) -> Iterator[Place]:
    end = threading.Event()

    async def slow(request: Request) -> Response:
        async def parts():
            yield b"first"
            while not end.is_set():
                await asyncio.sleep(0.01)
            yield b"last"

        return StreamingResponse(parts())

    routes = [Route("/small", small), Route("/large", large), Route("/slow", slow)]
    app = Starlette(routes=[*routes, Route("/body", body, methods=["POST"])])
    kind = type(
        "Hasty", (Connection,), {"head_seconds": head_seconds, "stall_seconds": stall_seconds}
    )
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", http=kind, limit_concurrency=most
    )
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: running.run(sockets=[listener]))
        thread.start()
        try:
            wait_until(lambda: running.started)
            yield Place(running, listener.getsockname(), end, kind)
        finally:
            end.set()
            running.should_exit = running.force_exit = True
            thread.join()


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=PATIENCE)
    connection.sendall(sent)
    return connection


def until(wanted: bytes, connection: socket.socket) -> bytes:
    """All that comes until something has come."""
    data = b""
    while wanted not in data:
        chunk = connection.recv(65536)
        assert chunk, data
        data += chunk
    return data


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


@pytest.mark.parametrize("sent", [b"", b"GET /small HT", GET[:-2]])
def test_a_silent_connection_is_closed(sent: bytes) -> None:
    with listening(head_seconds=0.1) as place, connect(place.address) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        assert rest_of(connection) == b""


def test_a_second_request_has_to_come_as_well() -> None:
    with listening() as place, connect(place.address, GET) as connection:
        assert until(b"small", connection)
        place.kind.head_seconds = 0.1
        connection.sendall(GET[:-2])
        assert rest_of(connection) == b""


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    with listening() as place, connect(place.address) as connection:
        place.kind.head_seconds = 0.1
        connection.sendall(b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n12")
        # Answered without it.
        assert b" 405 " in rest_of(connection)


def test_a_client_that_waits_for_its_answer_is_not_silent() -> None:
    with listening() as place, connect(place.address, SLOW) as connection:
        assert until(b"first", connection)
        place.kind.head_seconds = 0.1
        with connect(place.address) as silent:
            assert rest_of(silent) == b""
        place.end.set()
        assert until(b"last", connection)


@pytest.mark.parametrize(
    "sent", [b"", GET[:-2], GET, b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n12"]
)
def test_silent_connections_keep_nobody_out(sent: bytes) -> None:
    with listening(most=8) as place, connect(place.address, SLOW) as waiting:
        assert until(b"first", waiting)
        silent = [connect(place.address, sent) for _ in range(30)]
        for _ in range(3):
            with connect(place.address, GET) as connection:
                assert until(b"small", connection).startswith(b"HTTP/1.1 200")
        assert len(place.server.server_state.connections) <= 8
        place.end.set()
        assert until(b"last", waiting)
        for each in silent:
            each.close()


def test_more_answers_at_once_than_there_is_room_for_are_refused() -> None:
    with listening(most=4) as place:
        waiting = [connect(place.address, SLOW) for _ in range(3)]
        for each in waiting:
            assert until(b"first", each)
        with connect(place.address, GET) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        place.end.set()
        for each in waiting:
            each.close()


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    sent = GET.replace(b"small", b"large")
    with listening(stall_seconds=0.1) as place, connect(place.address, sent) as connection:
        assert connection.recv(1)
        wait_until(lambda: not place.server.server_state.connections)
        assert len(rest_of(connection)) < LARGE


def test_small_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = []
    made = Connection.connection_made

    def noting(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        connected = transport.get_extra_info("socket")
        delays.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", noting)
    with listening() as place, connect(place.address, GET) as connection:
        assert until(b"small", connection)
    assert delays and all(delays)


@pytest.mark.parametrize(
    ("files", "most", "room"),
    [
        ((256, -1), 4096, 1024),
        ((256, 1000), 1000, 500),
        ((1024, 20_000), 4096, 1024),
        ((8192, 8192), 8192, 1024),
        ((-1, -1), -1, 1024),
    ],
)
def test_connections_leave_files_for_others(
    files: tuple[int, int], most: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [files]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    assert server._room_for_connections() == room
    assert limits[-1] == (most, files[1])
