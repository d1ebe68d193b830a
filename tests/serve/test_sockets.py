"""What only a real connection shows: clients that leave, are slow or silent, or send nonsense."""

import asyncio
import logging
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.interfaces.records import Step
from mlx_specdec.serve import server as server_module
from mlx_specdec.serve.app import Access
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.server import Connection
from mlx_specdec.serve.settings import Limits

from ..support.serving import OPTIONS, PATIENCE, TEXT, Place, listening, post, served, wait_until


@pytest.fixture(scope="module")
def place(engine: Engine) -> Iterator[Place]:
    with listening(engine, Limits(body_seconds=0.5, body_bytes=10_000)) as place:
        yield place


def settings(seed: int) -> dict[str, Any]:
    """One request; some are greedy, some short, some do not speculate."""
    dice = random.Random(seed)
    return {
        "prompt": [dice.randrange(3, 300) for _ in range(dice.choice([1, 4, 15, 40]))],
        "max_tokens": dice.choice([3, 12, 30]),
        "temperature": dice.choice([0.0, 0.7, 1.0]),
        "seed": seed,
        **dice.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"frequency_penalty": 0.7}]),
        **dice.choice([{}, {"speculative": False}, {"speculative": {"max": 1}}]),
    }


def test_a_text_depends_on_prompt_settings_and_seed_alone(
    place: Place, alone: Callable[..., str]
) -> None:
    """Of forty requests over eight clients, a third of which leave while they are answered."""
    bodies = {seed: settings(seed) for seed in range(40)}
    wanted = {}
    for seed, body in bodies.items():
        options = {name: value for name, value in body.items() if name != "speculative"}
        wanted[seed] = alone(options.pop("prompt"), **options)
    got: dict[int, Any] = {}

    def client(first: int) -> None:
        for seed in range(first, 40, 8):
            if seed % 3 == 0:
                with place.connect() as connection:
                    connection.sendall(post({**bodies[seed], "stream": seed % 2 == 0}))
                    time.sleep(0.002 * (seed % 7))
                    if seed % 2 == 0:
                        connection.recv(10)
            else:
                got[seed] = place.ask(**bodies[seed])

    clients = [threading.Thread(target=client, args=[first]) for first in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert {status for status, _ in got.values()} == {200}
    texts = {seed: answer["choices"][0]["text"] for seed, (_, answer) in got.items()}
    assert texts == {seed: wanted[seed] for seed in bodies if seed % 3}
    wait_until(lambda: place.engine.requests == (0, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(
    place: Place, stream: bool
) -> None:
    whole = post({"prompt": TEXT, "max_tokens": 3000, "stream": stream, "n": 6})
    head = whole.index(b"\r\n\r\n")
    for stage in (0, 10, head + 4, len(whole) - 1, len(whole)):
        for reset in (True, False):
            with place.connect() as connection:
                connection.sendall(whole[:stage])
                if stage == len(whole):
                    wait_until(lambda: place.engine.requests == (4, 2))
                    if stream:
                        assert connection.recv(100).startswith(b"HTTP/1.1 200")
                if reset:
                    # Closes with a reset, as a process that crashes does.
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            wait_until(lambda: place.engine.requests == (0, 0))
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


@pytest.mark.parametrize("leaves", [True, False])
def test_the_log_counts_the_drafts_of_finished_and_of_stopped_answers(
    place: Place, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    caplog.set_level(logging.INFO, "mlx_specdec.serve.app")
    body = {"prompt": TEXT, "max_tokens": 3000 if leaves else 30, "ignore_eos": True}
    with place.connect() as connection:
        connection.sendall(post({**body, "stream": True}))
        data = b""
        while data.count(b"data: ") < 5:
            data += connection.recv(1000)
        while not leaves and b"[DONE]" not in data:
            data += connection.recv(1000)
    wait_until(lambda: "/v1/completions" in caplog.text)
    [logged] = re.findall(r"draft_n=(\d+) draft_n_accepted=(\d+)", caplog.text)
    assert int(logged[0]) >= int(logged[1]) > 0
    if not leaves:
        figures = rb'"draft_n": (\d+), "draft_n_accepted": (\d+)'
        assert [each.decode() for each in re.findall(figures, data)[-1]] == list(logged)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{", 408),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 20_000 + b"\r\n", 400),
        (post({"prompt": "x" * 20_000}), 413),
        (post({}, path="/v1/completions%0d%0aX-Bad:%201"), 404),
    ],
    ids=lambda sent: repr(sent[:40]) if isinstance(sent, bytes) else str(sent),
)
def test_nonsense_is_refused(place: Place, sent: bytes, status: int) -> None:
    with place.connect() as connection:
        connection.settimeout(10)
        with suppress(ConnectionError):
            connection.sendall(sent)
        assert f"HTTP/1.1 {status}".encode() in connection.recv(65536)
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


def test_hugging_faces_client_reads_what_it_expects(
    place: Place, pair: Pair, alone: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would not even connect to this machine.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    client = huggingface_hub.InferenceClient(f"http://127.0.0.1:{place.port}", token="none")
    text = alone(pair.tokenizer.encode(TEXT), max_tokens=10)
    assert client.text_generation(TEXT, max_new_tokens=10) == text
    streamed = client.text_generation(TEXT, max_new_tokens=10, stream=True)
    assert "".join(streamed) == text
    details = client.text_generation(TEXT, max_new_tokens=10, details=True)
    assert (details.generated_text, details.details.generated_tokens) == (text, 10)
    prompt = pair.tokenizer.encode("USER: Who?\nASSISTANT:")
    answer = client.chat_completion([{"role": "user", "content": "Who?"}], max_tokens=10)
    assert answer.choices[0].message.content == alone(prompt, max_tokens=10)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="top_p"):
        client.text_generation(TEXT, top_p=5.0)


LARGE = 16 << 20
GET = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = GET.replace(b"small", b"slow")


class Hasty(Connection):
    head_seconds = stall_seconds = PATIENCE


async def small(request: Request) -> Response:
    return PlainTextResponse("small")


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * LARGE)


@contextmanager
def waiting_server() -> Iterator[tuple[uvicorn.Server, Any, threading.Event]]:
    """A server, a function that connects to it, and an event that lets the answer at /slow end."""
    end = threading.Event()

    async def slow(request: Request) -> Response:
        async def parts():
            yield b"first"
            while not end.is_set():
                await asyncio.sleep(0.01)
            yield b"last"

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/small", small), Route("/large", large), Route("/slow", slow)])
    with served(app, http=Hasty) as (server, port):

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


def test_silent_connections_are_closed_and_waiting_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with waiting_server() as (_, connect, end), connect(SLOW) as waiting, connect(GET) as second:
        assert until(b"first", waiting) and until(b"small", second)
        monkeypatch.setattr(Hasty, "head_seconds", 0.1)
        second.sendall(GET[:-2])
        assert rest_of(second) == b""
        for sent in (b"", GET[:-2]):
            with connect(sent) as silent:
                assert rest_of(silent) == b""
        end.set()
        assert until(b"last", waiting)


def test_an_answer_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hasty, "stall_seconds", 0.1)
    with waiting_server() as (server, connect, _), connect(GET.replace(b"small", b"large")) as idle:
        assert idle.recv(1)
        wait_until(lambda: not server.server_state.connections)
        assert len(rest_of(idle)) < LARGE


def test_small_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = []
    made = Hasty.connection_made

    def noting(self: Hasty, transport: asyncio.Transport) -> None:
        made(self, transport)
        connected = transport.get_extra_info("socket")
        delays.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Hasty, "connection_made", noting)
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
