"""Engines, clients and requests for tests of the server."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import with_history
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.results import Step
from mlx_specdec.serve.app import Access, make_app
from mlx_specdec.serve.engine import CONNECTIONS, Engine
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.requests import ServiceSettings
from mlx_specdec.serve.server import Connection, listen

OPTIONS = Options(proposer="auto", num_draft=2, max_tokens=24, cost_cache=False)
SETTINGS = ServiceSettings()
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if calm %} {{ calm }}{% endif %}{% endif %}"
)


@contextmanager
def running(
    directories: tuple[Path, Path | None],
    options: Options = OPTIONS,
    *,
    batch_size: int = 4,
    memory_budget: int | None = None,
    history: bool = False,
) -> Iterator[Engine]:
    """An engine that has loaded."""
    remembering = with_history if history else lambda pair: pair
    engine = Engine(
        lambda: (remembering(load(*directories)), options),
        batch_size=batch_size,
        memory_budget=memory_budget,
    )
    assert engine.ready.wait(60) and engine.problem is None
    try:
        yield engine
    finally:
        engine.close()
        assert engine.join(60)


PROMPT = [5, 9, 40, 41, 42, 5, 9]


class Heard:
    """A listener that collects parts."""

    def __init__(self) -> None:
        self.parts: queue.Queue[Step] = queue.Queue()

    def __call__(self, part: Step) -> None:
        self.parts.put(part)

    def last(self) -> Step:
        while not (part := self.parts.get(timeout=60)).last:
            pass
        return part


def ask(engine: Engine, options=OPTIONS, prompt: list[int] = PROMPT) -> tuple[int, Heard]:
    listener = Heard()
    [number] = engine.submit([Request(prompt, options)], listener)
    return number, listener


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


TEXT = "def read_lines"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def registry_of(engine: Engine, settings: ServiceSettings = SETTINGS) -> Registry:
    """The registry of one model, "tiny", that an engine has loaded or is loading."""
    served = {"engine": engine, "counters": engine.counters, "stays": True}
    model = ServedModel("tiny", lambda: None, settings=settings, **served)
    registry = Registry([model], engine.batch_size)
    model.facts = registry.loaded(model).facts
    return registry


class App:
    """An application around a registry. FastAPI takes a quarter of a second to make one, so that
    all registries share it."""

    shared: ClassVar[Any] = None

    def __init__(self, registry: Registry) -> None:
        App.shared = App.shared or make_app(registry, Access())
        self._registry = registry

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.shared.state.registry = self._registry
        await self.shared(scope, receive, send)


def client_of(engine: Engine) -> TestClient:
    return client_for(registry_of(engine))


def client_for(registry: Registry) -> TestClient:
    return TestClient(App(registry), raise_server_exceptions=False)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def ok(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def broken_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    step, count = Scheduler.step, 0

    def counted(self: Scheduler):
        nonlocal count
        count += 1
        if count > steps:
            raise ValueError("/a/path/of/ours")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", counted)
        yield


PATIENCE = 60.0


@dataclass(frozen=True)
class Place:
    """Where somebody listens."""

    port: int
    engine: Engine

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def ask(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the whole answer."""
        with self.connect() as connection:
            connection.sendall(post(body))
            return answer_of(connection)


def post(body: dict[str, Any], path: str = "/v1/completions", close: bool = True) -> bytes:
    content = json.dumps(body).encode()
    ending = "Connection: close\r\n" if close else ""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n{ending}"
    return head.encode() + b"\r\n" + content


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    """Everything that comes until the other side closes."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    head, _, content = data.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(content) if content[:1] == b"{" else content


@contextmanager
def served(app: Any, **settings: Any) -> Iterator[tuple[uvicorn.Server, int]]:
    """Serve an application on loopback, and yield the server and its port."""
    config = uvicorn.Config(
        app,
        **{
            "log_config": None,
            "lifespan": "off",
            "ws": "none",
            "http": partial(Connection, CONNECTIONS, PATIENCE),
            **settings,
        },
    )
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextmanager
def listening(engine: Engine, settings: ServiceSettings) -> Iterator[Place]:
    with served(App(registry_of(engine, settings))) as (_, port):
        yield Place(port, engine)
