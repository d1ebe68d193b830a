"""docs/examples/haproxy.cfg: a server restarts while clients send requests, and none notices."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .support import ROOT, checkpoint, served, wait_until

EXAMPLE = ROOT / "docs" / "examples" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/local/bin:/opt/homebrew/bin")
KEYS = [f"key {number}" for number in range(8)]
LONG = "x" * 40_000
"""More than HAProxy's default buffer holds."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [stack.enter_context(each).getsockname()[1] for each in sockets]


@contextmanager
def proxy(directory: Path, ports: list[int]) -> Iterator[None]:
    text = EXAMPLE.read_text()
    for number, port in zip((8080, 8081, 8082), ports, strict=True):
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{port}")
    (directory / "haproxy.cfg").write_text(text)
    assert HAPROXY is not None
    process = subprocess.Popen([HAPROXY, "-db", "-f", directory / "haproxy.cfg"])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def ask(port: int, key: str, **more: Any) -> tuple[int, str, str, int]:
    """The status, the server's name, the text and the number of cached tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "prompt": "def read_lines(file):\n    return",
        "max_tokens": 40,
        "temperature": 0,
        **more,
    }
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        read = answer.read()
    finally:
        connection.close()
    name = answer.headers.get("x-server", "")
    if answer.status != 200:
        return answer.status, name, read.decode(), 0
    whole = json.loads(read)
    return 200, name, whole["choices"][0]["text"], whole["timings"]["cache_n"]


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def traffic(port: int) -> Iterator[list[tuple[int, str, str, int]]]:
    """What four clients are answered meanwhile."""
    answers: list[tuple[int, str, str, int]] = []
    done = threading.Event()

    def client(number: int) -> None:
        while not done.is_set():
            for key in KEYS[number::4]:
                answers.append(ask(port, key))

    clients = [threading.Thread(target=client, args=[number]) for number in range(4)]
    for each in clients:
        each.start()
    try:
        wait_until(lambda: len(answers) > 8)
        yield answers
    finally:
        done.set()
        for each in clients:
            each.join()


@pytest.mark.slow
@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_no_request_is_lost_while_a_server_restarts(tmp_path: Path) -> None:
    ports = free_ports(3)
    flags = ["--model", checkpoint(tmp_path / "model"), "--no-cost-cache", "--drain-seconds", 3]
    with ExitStack() as stack:
        stack.enter_context(proxy(tmp_path, ports))
        first, second = (stack.enter_context(served(*flags, "--port", port)) for port in ports[1:])

        def places() -> dict[str, str]:
            return {key: ask(ports[0], key)[1] for key in KEYS}

        for port in ports[1:]:
            wait_until(partial(healthy, port))
        wait_until(lambda: set(places().values()) == {"a", "b"})
        before = places()
        text = ask(ports[0], KEYS[0])[2]
        for key in KEYS:
            status, _, again, _ = ask(ports[0], key)
            assert (status, again) == (200, text)
        # Seldom, one passes to the other server because answers that ended count as running yet.
        wait_until(lambda: places() == before)
        wait_until(lambda: min(ask(ports[0], key)[3] for key in KEYS) > 5)
        # A conversation has its place whatever the key, also where its name comes late.
        last = {"metadata": {"padding": LONG}, "prompt_cache_key": "a conversation"}
        wait_until(lambda: len({ask(ports[0], key, **last)[1] for key in KEYS}) == 1)

        with traffic(ports[0]) as answers:
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(60) == 0
            stack.enter_context(served(*flags, "--port", ports[1]))
            wait_until(lambda: healthy(ports[1]))
            count = len(answers)
            wait_until(lambda: "a" in {each[1] for each in answers[count:]})
        assert {(status, said) for status, _, said, _ in answers} == {(200, text)}
        assert {name for _, name, _, _ in answers} == {"a", "b"}
        wait_until(lambda: places() == before)
        # What crashes loses the streams that it has begun, but no whole answer.
        with traffic(ports[0]) as answers:
            second.process.kill()
            count = len(answers)
            wait_until(lambda: len(answers) > count + 20)
        assert {(status, said) for status, _, said, _ in answers} == {(200, text)}
