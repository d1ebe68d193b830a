"""What only a real connection shows: clients that leave, are slow or silent, or send nonsense."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.prompt_cache import Store
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.results import Step
from mlx_specdec.serve import server as server_module
from mlx_specdec.serve.app import Access
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.requests import ServiceSettings
from mlx_specdec.serve.server import Connection

from ..support.serving import OPTIONS, PATIENCE, TEXT, Place, listening, post, served, wait_until


@pytest.fixture(scope="module")
def place(engine: Engine) -> Iterator[Place]:
    with listening(engine, ServiceSettings(seconds=1.0)) as place:
        yield place


def test_a_body_that_does_not_come_is_refused(place: Place) -> None:
    with place.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"
        connection.sendall(head + b"{")
        answer = connection.recv(65536)
        assert b"HTTP/1.1 503" in answer and b"the time of this request was over" in answer
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


LARGE = 16 << 20
GET = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = GET.replace(b"small", b"slow")


async def small(request: Request) -> Response:
    return PlainTextResponse("small")


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * LARGE)


@contextmanager
def waiting_server(
    seconds: float = PATIENCE,
) -> Iterator[tuple[uvicorn.Server, Any, threading.Event]]:
    """A server, a function that connects to it, and an event that lets the answer at /slow end.
    seconds: The time for an answer."""
    end = threading.Event()

    async def slow(request: Request) -> Response:
        async def parts():
            yield b"first"
            while not end.is_set():
                await asyncio.sleep(0.01)
            yield b"last"

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/small", small), Route("/large", large), Route("/slow", slow)])
    with served(app, http=partial(Connection, 2, seconds)) as (server, port):

        def connect(sent: bytes = b"") -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            connection.sendall(sent)
            return connection

        try:
            yield server, connect, end
        finally:
            end.set()


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


def test_connections_without_an_answer_are_closed_after_a_time() -> None:
    for sent in (b"", GET[:-2], GET.replace(b"small", b"large")):
        with waiting_server(0.3) as (server, connect, _), connect(sent) as idle:
            wait_until(lambda: len(server.server_state.connections) == 1)
            wait_until(lambda: not server.server_state.connections)
            assert len(rest_of(idle)) < LARGE


def test_connections_beyond_the_bound_are_closed_and_others_are_not() -> None:
    with waiting_server() as (_, connect, end), connect(SLOW) as waiting, connect(GET) as second:
        assert until(b"first", waiting) and until(b"small", second)
        with connect() as third:
            assert rest_of(third) == b""
        second.sendall(GET)
        assert until(b"small", second)
        end.set()
        assert until(b"last", waiting)


def test_small_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = []
    made = Connection.connection_made

    def noting(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        connected = transport.get_extra_info("socket")
        delays.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", noting)
    with waiting_server() as (_, connect, _), connect(GET) as connection:
        assert until(b"small", connection)
    assert delays and all(delays)


def ask_and_end(port: int) -> None:
    """Request more than there is time for, and end the server with the first chunk."""
    while True:
        with (
            suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        ):
            connection.sendall(post({"prompt": "def", "max_tokens": 4000, "stream": True}))
            while data := connection.recv(1000):
                if b"data: {" in data:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
        time.sleep(0.05)  # it is loading


def test_the_prompt_cache_is_written_though_the_last_step_takes_long(
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, step = tmp_path / "blocks", Scheduler.step
    caplog.set_level(logging.INFO, "mlx_specdec.serve.server")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def slow(self: Scheduler) -> list[Step]:
        parts = step(self)
        time.sleep(0.3)
        return parts

    monkeypatch.setattr(Scheduler, "step", slow)
    monkeypatch.setattr(server_module, "CUT_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "FINISH_SECONDS", 0)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    client = threading.Thread(target=ask_and_end, args=[port], daemon=True)
    client.start()
    model = ServedModel("tiny", lambda: (load(*llama), OPTIONS), store=Store(directory=directory))
    server_module.serve(Registry([model], batch_size=2), "127.0.0.1", port, access=Access())
    client.join()
    assert codes == [0] and any(directory.iterdir())
    assert not any(line.startswith("not waiting") for line in caplog.messages)
    assert f"waiting for tiny, which writes its prompt cache to {directory}" in caplog.messages
