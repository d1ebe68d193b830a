"""Tiny checkpoints, commands and servers for tests through the public face.

`command` runs a command in this process, which takes milliseconds where a new process takes a
second. `served` starts `mlx-specdec serve` as a process of its own."""

import contextlib
import functools
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
import numpy as np
import pytest
import typer.main
from tokenizers import AddedToken, Tokenizer, models

from ..support import tiny
from ..support.tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
"""Seconds that a test waits for a server before it fails. Nothing takes this long."""
SLOWLY = re.compile(
    r"^(loading .*|prefilling the prompt|trying whether passes .*|(downloading|converting|checking"
    r"|reading|training).*: .+ of .+|comparing what .*|computing the checksums .*)\n",
    re.MULTILINE,
)
"""Lines that a program prints about work of more than two seconds, as on a busy machine."""
# Typer makes all commands anew for each run, which takes longer than most refusals.
typer.main.get_command = functools.cache(typer.main.get_command)


def quick(names: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the parameters of a test, of which the suite for every day tries only `fast`."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    def refuses(self, *parts: str) -> None:
        """Check for one line on standard error with all parts, and exit code 2."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err, self.err


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def command(
    *arguments: object,
    stdin: str | bytes | TextIO = "",
    terminal: bool = False,
    encoding: str = "utf-8",
) -> Outcome:
    """Run `mlx-specdec` with these arguments in this process.

    Interrupts are ignored, as for a program that nohup starts: no thread watches for them.

    Args:
        terminal: Whether the streams, unless `stdin` is one, are a terminal.
        encoding: The encoding of standard output and standard error.
    """
    stream_of = Terminal if terminal else io.TextIOWrapper
    data = stdin.encode() if isinstance(stdin, str) else stdin
    before = sys.argv, sys.stdin, signal.signal(signal.SIGINT, signal.SIG_IGN)
    buffers = io.BytesIO(), io.BytesIO()
    out, err = (stream_of(buffer, encoding=encoding) for buffer in buffers)
    sys.argv = ["mlx-specdec", *map(str, arguments)]
    if isinstance(data, bytes):
        data = stream_of(io.BytesIO(data), encoding="utf-8")
    sys.stdin = data
    code: Any = 0
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            warnings.simplefilter("default", UserWarning)
            runpy.run_module("mlx_specdec", run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.stdin = before[:2]
        signal.signal(signal.SIGINT, before[2])
    for stream in (out, err):
        stream.flush()
    texts = [buffer.getvalue().decode(encoding) for buffer in buffers]
    return Outcome(code, texts[0], SLOWLY.sub("", texts[1]))


def process(*arguments: object, stdin: bytes = b"", **environment: str) -> Outcome:
    """Run `mlx-specdec` with these arguments in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_specdec", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=PATIENCE,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    template: str = "",
    tokens: tuple[str, ...] = (),
    special: bool = False,
    **config: Any,
) -> Path:
    """Write a tiny random decoder-only model of a family in tests/support/tiny.py.

    Args:
        template: The chat template; a model without one does not chat.
        tokens: Strings that become one token each.
        special: Whether these tokens are special, so that they are never printed.
        config: Changes of config.json.
    """
    byte_level(directory, **({"chat_template": template} if template else {}))
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(file)
    tiny.write(family, directory, seed, vocab_size=tokenizer.get_vocab_size(), **config)
    return directory


def numbered(directory: Path, size: int) -> Path:
    """Write a tokenizer of so many words, w000, w001, ..."""
    words = Tokenizer(models.WordLevel({f"w{n:03}": n for n in range(size)}, unk_token="w000"))
    words.save(str(directory / "tokenizer.json"))
    return directory


def hidden_states(network: Any, tokens: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the output of each layer of a Llama of mlx-lm, and the normed one, in float64."""
    rows, states = network.model.embed_tokens(mx.array([tokens])), []
    for layer in network.model.layers:
        rows = layer(rows, "causal", None)
        states.append(np.array(rows[0]).astype(np.float64))
    return states, np.array(network.model.norm(rows)[0]).astype(np.float64)


def moved(source: Path, target: Path, amount: float = 0.05) -> Path:
    """Copy a checkpoint with each weight changed by a random number: a draft for it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    weights: Any = mx.load(str(source / "model.safetensors"))
    keys = mx.random.split(mx.random.key(1), len(weights))
    changed = {
        name: array + amount * mx.random.normal(array.shape, key=key)
        for (name, array), key in zip(sorted(weights.items()), keys, strict=True)
    }
    mx.save_safetensors(str(target / "model.safetensors"), changed, {"format": "mlx"})
    return target


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: status, headers with names in small letters, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each server-sent event, or of each line of ollama's streams."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]


class Server:
    """A running `mlx-specdec serve`.

    log, printed: The lines that it has written to standard error and to standard output."""

    def __init__(self, running: "subprocess.Popen[str]") -> None:
        self.process, self.log, self.printed = running, list[str](), list[str]()
        self.port = 0
        self._listens = threading.Event()
        self._readers = [threading.Thread(target=read) for read in (self._read, self._read_out)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.printed += (line.rstrip("\n") for line in lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if not self.port and (found := re.search(r"http://[^/:]+:(\d+)", line)):
                self.port = int(found[1])
                self._listens.set()
        self.process.stderr.close()
        self._listens.set()

    def listens(self) -> None:
        """Wait until the server listens."""
        assert self._listens.wait(PATIENCE) and self.port, self.log

    def ready(self) -> None:
        """Wait until the server listens and its first model is loaded."""
        self.listens()
        end = time.monotonic() + PATIENCE
        while self.get("/health").status != 200:
            assert time.monotonic() < end and self.process.poll() is None, self.log
            time.sleep(0.02)

    def waits_for(self, text: str) -> None:
        """Wait until a line of the log contains a text, or the server has ended."""
        wait_until(
            lambda: any(text in line for line in self.log) or self.process.poll() is not None
        )

    def connect(self, sent: bytes = b"") -> socket.socket:
        """Return a connection on which some bytes have been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.sendall(sent)
        return connection

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """Send a body as JSON, or the bytes themselves; without a body the method is GET."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, method=method)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                fields = {name.lower(): value for name, value in answer.headers.items()}
                return Answer(answer.status, fields, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                fields = {name.lower(): value for name, value in error.headers.items()}
                return Answer(error.code, fields, error.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask(path, **headers)

    def metrics(self, **headers: str) -> dict[str, float]:
        """Return the values of /metrics by their names with labels."""
        lines = self.get("/metrics", **headers).body.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def requests(self, model: str, **headers: str) -> tuple[float, float]:
        """Return the numbers of requests to a model that are decoded and that wait."""
        metrics = self.metrics(**headers)
        running, waiting = (
            metrics[f'mlx_specdec:model_requests_{state}{{model_name="{model}"}}']
            for state in ("running", "waiting")
        )
        return running, waiting

    def ok(self, path: str, **body: Any) -> Any:
        """Send a body that must be answered with 200, and return the JSON of the answer."""
        answer = self.ask(path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def close(self, wait: float = PATIENCE) -> int:
        """End the server as Ctrl-C does, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(wait)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join()


def post(path: str, body: Any, *lines: str) -> bytes:
    """Return the bytes of a request, with further lines of its head."""
    content = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(content)}", *lines)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


@contextlib.contextmanager
def served(
    *flags: object, waits: bool = True, program: str = "", **environment: str
) -> Iterator[Server]:
    """Start `mlx-specdec serve` with these flags on a free port, and end it afterwards.

    Args:
        waits: Whether to wait until the first model is loaded.
        program: Python's code that runs before the package in the server's process.
    """
    code = f"{program}\nimport runpy\nrunpy.run_module('mlx_specdec', run_name='__main__')"
    start = ("-c", code) if program else ("-m", "mlx_specdec")
    running = subprocess.Popen(
        [sys.executable, *start, "serve", "--port", "0", *map(str, flags)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        bufsize=1,
    )
    server = Server(running)
    try:
        (server.ready if waits else server.listens)()
        yield server
    finally:
        server.close()
