"""Few open files, memory after a load, and signals at every time of a server's life."""

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import PATIENCE, checkpoint, served

FEW = 256
"""The default limit of open files on macOS."""


@contextlib.contextmanager
def few_at_first() -> Iterator[None]:
    """Lower the soft limit of this process, which its processes inherit, as far as they can be
    started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(FEW, 64 + max(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


@contextlib.contextmanager
def silent_hub() -> Iterator[str]:
    """A Hugging Face Hub that accepts connections and never answers, so that a model loads until
    the server ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_signals_end_a_server_while_a_model_loads(
    signals: tuple[signal.Signals, ...], llama: Path, tmp_path: Path
) -> None:
    models, slow = ("--model", llama, "--model", "nobody/slow"), "nobody/slow"
    with silent_hub() as url:
        hub: dict[str, Any] = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        with served(*models, "--no-wait", **hub) as server:
            assert server.ask("/v1/completions", {"model": slow, "prompt": "x"}).status == 503
            server.waits_for(f"loading {slow}")
            for number in signals:
                server.process.send_signal(number)
                server.waits_for("shutting down")
            assert server.process.wait(PATIENCE) == 0
    assert not any("Traceback" in line for line in server.log), server.log


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are read from /proc")
def test_a_server_keeps_its_limits_and_writes_its_prompt_cache_at_a_signal(
    llama: Path, tmp_path: Path
) -> None:
    """The server raises the soft limit of open files, and loading a model lowers neither limit. The
    first signal ends the server after its caches are written, and the next one at once."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with few_at_first(), served("--model", llama, "--prompt-cache-dir", tmp_path) as server:
        server.ok("/v1/completions", prompt="A text " * 60, max_tokens=2)
        limits: Any = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.returncode == 0
    assert limits == (4096 if hard == resource.RLIM_INFINITY else min(4096, hard), hard)
    assert not any("Traceback" in line for line in server.log), server.log
