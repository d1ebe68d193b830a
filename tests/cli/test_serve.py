"""The serve command as a program: its beginning, its signals, its end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_specdec import process
from mlx_specdec.cli import serve as command

from ..support.commands import Run, fails

ROOT = Path(__file__).resolve().parents[2]
needs_extra = pytest.mark.skipif(
    any(command.find_spec(name) is None for name in command.NEEDED),
    reason="the extra server is not installed",
)


class Server:
    """A running `mlx-specdec serve` and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.said.append(line)
                if line.endswith("INFO ready\n"):
                    self._ready.set()
        self._ready.set()

    @property
    def address(self) -> str:
        assert self._ready.wait(60)
        [line] = [each for each in self.said if "listening on" in each]
        return re.search(r"http://\S+", line)[0]

    def ask(self, path: str, headers: dict[str, str] | None = None, **body: object):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.address + path, data, headers or {})
        return urllib.request.urlopen(request, timeout=60)

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join()
        return code


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[Server]:
    line = [sys.executable, "-m", "mlx_specdec", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(
        line, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    try:
        server = Server(process)
        yield server
    finally:
        process.kill()
        server.end()


@needs_extra
def test_a_server_with_a_key_drains_lets_answers_end_and_says_so(llama: Path) -> None:
    arguments = ("--model", llama, "--no-cache", "--drain-seconds", 60)
    with serving(*arguments, MLX_SPECDEC_API_KEY="hush") as server:
        url, key = server.address, {"Authorization": "Bearer hush"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.ask("/v1/models")
        with server.ask("/v1/models", key) as answer:
            assert json.load(answer)["data"][0]["id"] == llama.name
            assert answer.headers["Keep-Alive"] == "timeout=70"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            server.ask("/v1/models", {**key, "Host": "evil.example"})
        assert server.ask("/health").status == 200
        body = {"prompt": "def", "max_tokens": 400, "stream": True}
        with server.ask("/v1/completions", key, **body) as answer:
            begin = answer.read(30)
            server.process.send_signal(signal.SIGTERM)
            for _ in range(600):
                try:
                    server.ask("/health").close()
                    time.sleep(0.01)
                except urllib.error.HTTPError as refused:
                    assert refused.code == 503 and b"shutting down" in refused.read()
                    break
            else:
                pytest.fail("/health stays 200")
            assert server.ask("/v1/completions", key, prompt="def", max_tokens=2).status == 200
            server.process.send_signal(signal.SIGTERM)
            text = (begin + answer.read()).decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in text
        assert server.end() == 0
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(url)
    log = "".join(server.said)
    assert "Traceback" not in log and "hush" not in log
    assert re.search(r"method=POST path=/v1/completions status=200 .* tokens=400 draft_n=", log)


@needs_extra
def test_ctrl_c_says_what_it_waits_for_and_a_second_one_cuts_it_without_a_traceback(
    llama: Path,
) -> None:
    answers: dict[bool, tuple[int, bytes]] = {}

    def ask(stream: bool) -> None:
        body = {"prompt": "def", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        try:
            with server.ask("/v1/completions", **body) as answer:
                answers[stream] = answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            answers[stream] = refused.code, refused.read()

    with serving("--model", llama, "--no-cache") as server:
        url = server.address
        clients = [threading.Thread(target=ask, args=[stream]) for stream in (True, False)]
        for client in clients:
            client.start()
        running = re.compile(rb"vllm:num_requests_running\{.*\} 2\.0")
        while not running.search(urllib.request.urlopen(f"{url}/metrics").read()):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        hint = f"finishing 2 requests (2 of {llama.name}); press Ctrl-C again to stop\n"
        while not any(line.endswith(hint) for line in server.said):
            assert server.process.poll() is None, server.said
            time.sleep(0.01)
        assert server.end(signal.SIGINT) == 0
        for client in clients:
            client.join()
    for stream, (status, answer) in answers.items():
        assert status == (200 if stream else 503) and b"the server is shutting down" in answer
    assert len(answers) == 2
    assert not any("Traceback" in line or "ERROR" in line for line in server.said)


@needs_extra
@pytest.mark.slow
def test_what_was_read_is_kept_until_the_next_start_and_ctrl_c_lets_answers_end(
    llama: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "prompts"
    cached = []
    for _ in range(2):
        with serving("--model", llama, "--no-cache", "--prompt-cache-dir", directory) as server:
            with server.ask("/v1/completions", prompt="def read_lines(", max_tokens=2) as answer:
                cached.append(json.load(answer)["timings"]["cache_n"])
            body = {"prompt": "def", "max_tokens": 400, "stream": True}
            with server.ask("/v1/completions", **body) as answer:
                begin = answer.read(30)
                server.process.send_signal(signal.SIGINT)
                assert (begin + answer.read()).endswith(b"data: [DONE]\n\n")
            assert server.end() == 0
    assert directory.is_dir() and cached[0] == 0 < cached[1]


@needs_extra
@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
@pytest.mark.parametrize("name", ["weights/none", "none", "nobody/none", "/none/none"])
def test_a_model_that_is_not_there_ends_the_server_with_a_line(
    run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch, flag: str, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mlx_specdec.serve.server.serve", lambda *_, **__: pytest.fail("listening"))
    target = () if flag == "--model" else ("--model", llama)
    fails(run("serve", *target, flag, name), "error: ", name)


@needs_extra
def test_a_port_that_is_taken_is_reported_in_a_line(run: Run, llama: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--model", llama, "--port", port)
    fails(done, f"error: cannot listen on 127.0.0.1 port {port} (")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch-size", 0), "'--batch-size': it must be greater"),
        (("--max-model-len", 1), "'--max-model-len': it must be greater"),
        (("--drain-seconds", -1), "'--drain-seconds': it must be greater"),
        (("--timeout", "nan"), "--timeout must be more than 0"),
        (("--max-waiting", -1), "'--max-waiting': it must be greater"),
        (("--api-key", ""), "--api-key is empty"),
        (("--cors-origin", "their.example"), "--cors-origin must be an origin such as"),
        (("--tool-call-parser", "lama"), "--tool-call-parser lama is unknown: it must be one of"),
        (("--port", 99999), "--port must lie between 0 and 65535"),
        (("--top-p", 2), "top-p must lie in"),
        (("--log-level", "loud"), "--log-level"),
        (("--prompt-cache-bytes", "much"), "is no size"),
        (("--memory-budget", "much"), "is no size"),
        (("--memory-budget", 0), "--memory-budget must be more than 0"),
        (("--prompt-cache-bytes", 0, "--prompt-cache-dir", "x"), "0 keeps nothing"),
        (("--prompt-cache-dir", __file__), "--prompt-cache-dir"),
    ],
)
def test_wrong_flags_are_reported_in_a_line(
    run: Run, llama: Path, arguments: tuple[object, ...], said: str
) -> None:
    fails(run("serve", "--model", llama, *arguments), said)


def test_without_the_extra_one_line_says_what_to_do(
    run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(process, "install", lambda extra: f"install {extra}")
    said = "the server needs fastapi and uvicorn: install server"
    fails(run("serve", "--model", llama), said)


def test_the_translator_names_its_page_and_no_agents(capfd: pytest.CaptureFixture[str]) -> None:
    with serving("--no-cache") as server:
        url = server.address
        assert server.ask("/props").status == 200
        server.end(signal.SIGTERM)
    said = capfd.readouterr().out.splitlines()
    assert said[0].split() == ["Browser", url] and [line.split()[0] for line in said[1:]] == [
        "OpenAI"
    ]
