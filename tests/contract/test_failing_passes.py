"""Passes that fail or take too long: what clients read, and when the server is not healthy."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from ..support.commands import SAID
from .support import Answer, Server, checkpoint, moved, served, wait_until

FAULTY_MLX = """
import pathlib, time
import mlx.core as mx

def faulty(compute):
    def call(*arrays):
        while (fault := pathlib.Path(FAULT)).exists():
            if (text := fault.read_text()) != "wait":
                raise RuntimeError(text)
            time.sleep(0.01)
        return compute(*arrays)
    return call

mx.eval, mx.async_eval = map(faulty, (mx.eval, mx.async_eval))
"""
"""While a file exists, MLX raises the error that is in it, or computes nothing."""
COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "def read_lines", "max_tokens": 3000, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Who?"}]


@dataclass(frozen=True)
class Faulty:
    """A server with an MLX that fails on demand.

    loading: What it answered while its model was loaded."""

    server: Server
    file: Path
    loading: list[Answer] = field(default_factory=list)

    @contextmanager
    def fault(self, text: str) -> Iterator[None]:
        """Let MLX raise an error with this text, or wait."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self.file)
        try:
            yield
        finally:
            os.replace(self.file, partial)

    @contextmanager
    def begun(self, path: str, body: dict[str, Any]) -> Iterator[HTTPResponse]:
        """Open a stream, and wait for the first text."""
        with closing(HTTPConnection("127.0.0.1", self.server.port)) as client:
            client.request("POST", path, json.dumps({"stream": True, **body}))
            answer = client.getresponse()
            assert answer.status == 200 and answer.read(200)
            yield answer


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    directory = tmp_path_factory.mktemp("faulty")
    target = checkpoint(directory / "model", max_position_embeddings=200_000)
    draft = moved(target, directory / "draft")
    flags = ("--model", target, "--draft-model", draft, "--num-draft", 2, "--no-cost-cache")
    program = f"FAULT = {str(directory / 'fault')!r}\n{FAULTY_MLX}"
    more = ("--timeout", 4, "--cors-origin", "*", "--strict-model", "--no-wait")
    (directory / "fault").write_text("wait")
    with served(*flags, *more, waits=False, program=program) as server:
        loading = [
            server.get("/health"),
            server.ask("/v1/chat/completions", {"messages": MESSAGES}),
        ]
        loading.append(server.get("/metrics"))
        (directory / "fault").unlink()
        server.ready()
        yield Faulty(server, directory / "fault", loading)


def test_while_the_model_is_loaded_clients_are_told_to_come_again(faulty: Faulty) -> None:
    *answers, metrics = faulty.loading
    for answer in answers:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        said = "the model model is loading: try again in 1 s, or start the server without --no-wait"
        assert answer.json["error"]["message"].startswith(said)
    assert metrics.status == 200


def works(faulty: Faulty) -> None:
    faulty.server.ok(COMPLETIONS, prompt="x", max_tokens=2)


STREAMS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    COMPLETIONS: (PROMPT, lambda last: last["error"]["type"] == "server_error"),
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True},
        lambda last: last["error"]["type"] == "server_error",
    ),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 3000},
        lambda last: (last["type"], last["error"]["type"]) == ("error", "api_error"),
    ),
    "/api/generate": (
        {"prompt": "x", "options": {"num_predict": 3000}},
        lambda last: list(last) == ["error"] and "failed inside" in last["error"],
    ),
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_pass_that_fails_ends_a_stream_with_an_error(faulty: Faulty, path: str) -> None:
    body, is_error = STREAMS[path]
    with faulty.begun(path, body) as answer, faulty.fault("/a/path/of/ours"):
        lines = [line for line in answer.read().decode().splitlines() if line]
    last = lines[-1].removeprefix("data: ")
    assert is_error(json.loads(last)), last
    assert "ours" not in "".join(lines) and "[DONE]" not in lines[-1]
    works(faulty)


def test_a_complete_answer_of_a_pass_that_fails_is_an_error(faulty: Faulty) -> None:
    with faulty.fault("/a/path/of/ours"):
        for path, body in STREAMS.items():
            answer = faulty.server.ask(path, {**body[0], "stream": False})
            assert answer.status == 500 and answer.headers["x-should-retry"] == "false"
            assert b"ours" not in answer.body
    works(faulty)


def test_a_client_reads_that_memory_has_ended_or_the_gpu_has_given_up(faulty: Faulty) -> None:
    for message, said in SAID.items():
        with faulty.fault(message):
            answer = faulty.server.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 3})
        error = answer.json["error"]["message"]
        assert answer.status == 500 and said in error and "RuntimeError" not in error
        works(faulty)


def test_health_is_that_texts_make_progress(faulty: Faulty) -> None:
    body = {"prompt": "x", "max_tokens": 3}
    works(faulty)
    for failed in range(1, 4):
        with faulty.fault("no progress"):
            assert faulty.server.ask(COMPLETIONS, body).status == 500
        expected = [503 if failed == 3 else 200]
        wait_until(lambda: faulty.server.get("/health").status in expected)  # noqa: B023
    answer = faulty.server.get("/health")
    assert answer.json["error"]["code"] == "no_progress" and answer.headers["retry-after"]
    works(faulty)
    health = faulty.server.get("/health").json
    assert (health["status"], health["last_failure"]) == ("ok", "RuntimeError")
    assert health["failures"] >= 3
    failures = faulty.server.metrics()['mlx_specdec:requests_failed_total{model_name="model"}']
    assert failures >= 3


def test_a_request_whose_time_is_over_keeps_its_text(faulty: Faulty) -> None:
    """One without a token is to be tried again later."""
    server = faulty.server
    with faulty.begun(COMPLETIONS, PROMPT) as stream, ThreadPoolExecutor(2) as pool:
        generated = server.metrics()['vllm:generation_tokens_total{model_name="model"}']
        complete = pool.submit(server.ask, COMPLETIONS, PROMPT)
        wait_until(lambda: server.requests("model") == (2, 0))
        wait_until(
            lambda: (
                server.metrics()['vllm:generation_tokens_total{model_name="model"}']
                > generated + 50
            )
        )
        with faulty.fault("wait"):
            waiting = pool.submit(server.ask, COMPLETIONS, {"prompt": "x", "max_tokens": 2})
            [choice] = complete.result().json["choices"]
            assert choice["finish_reason"] == "length" and choice["text"]
            text = stream.read().decode()
            assert '"finish_reason": "length"' in text and text.endswith("data: [DONE]\n\n")
            late = waiting.result()
            assert late.status == 503 and late.json["error"]["code"] == "timeout"
            assert late.headers["retry-after"] == "10"
            assert server.get("/health").status == 200
    wait_until(lambda: server.requests("model") == (0, 0))
    works(faulty)
