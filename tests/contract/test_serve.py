"""`serve` as a program: wrong flags, its key, the end that a signal asks for, and its output."""

import contextlib
import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Answer, Server, checkpoint, command, served

LONG = {"prompt": "def", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "llama")


def test_a_port_that_is_taken_is_reported_in_a_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", "--model", model, "--port", port)
    done.refuses(f"error: cannot listen on 127.0.0.1 port {port} (")


def test_without_the_extra_one_line_says_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = command("serve", "--model", model)
    done.refuses("the server needs fastapi: ", " -m pip install ", "fastapi")


@contextlib.contextmanager
def stream(server: Server, **body: object) -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to a streaming request, after its first bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Authorization": "Bearer hush"}
        body = {**LONG, "stream": True, **body}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        yield answer


def test_a_server_with_a_key_lets_answers_end_and_says_so(model: Path) -> None:
    key = {"Authorization": "Bearer hush"}
    flags = ("--model", model, "--no-cost-cache")
    with served(*flags, MLX_SPECDEC_API_KEY="hush") as server:
        assert server.ask("/v1/models").status == 401
        answer = server.ask("/v1/models", **key)
        assert answer.json["data"][0]["id"] == model.name
        assert answer.headers["keep-alive"] == "timeout=70"
        assert server.ask("/v1/models", Host="evil.example", **key).status == 403
        with stream(server, max_tokens=400) as answering:
            server.process.send_signal(signal.SIGTERM)
            text = answering.read().decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in text
        assert server.close() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
    log = "\n".join(server.log)
    assert "Traceback" not in log and "hush" not in log
    assert re.search(r"method=POST path=/v1/completions status=200 .* tokens=400 draft_n=", log)


def test_the_translator_names_its_page_and_ctrl_c_says_what_it_waits_for() -> None:
    answers: dict[bool, Answer] = {}

    def ask(streams: bool) -> None:
        answers[streams] = server.ask("/v1/completions", {**LONG, "stream": streams})

    with served("--no-cost-cache") as server:
        clients = [threading.Thread(target=ask, args=[streams]) for streams in (True, False)]
        for client in clients:
            client.start()
        running = re.compile(rb"mlx_specdec:model_requests_running\{.*\} 2$", re.M)
        while not running.search(server.get("/metrics").body):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        server.waits_for("finishing 2 requests; press Ctrl-C again to stop")
        assert server.close() == 0
        for client in clients:
            client.join()
    assert (answers[True].status, answers[False].status) == (200, 503)
    assert all(b"the server is shutting down" in answer.body for answer in answers.values())
    assert not any("Traceback" in line or "ERROR" in line for line in server.log)
    first, *more = server.printed
    assert first.split() == ["Browser", f"http://127.0.0.1:{server.port}"]
    assert [line.split()[0] for line in more] == ["OpenAI"]
