"""The process around the application, at its end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.engine.request import Part
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.serve import server
from mlx_specdec.serve.app import Access
from mlx_specdec.serve.settings import ServiceSettings

from ..support.serving import OPTIONS, post


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
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, step = tmp_path / "kept.safetensors", Scheduler.step
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def slow(self: Scheduler) -> list[Part]:
        parts = step(self)
        time.sleep(0.3)
        return parts

    def killed(code: int) -> None:
        raise AssertionError("nobody waited for the last step")

    monkeypatch.setattr(Scheduler, "step", slow)
    monkeypatch.setattr(server, "CUT_SECONDS", 0.05)
    monkeypatch.setattr(server, "DRAIN_SECONDS", 0)
    monkeypatch.setattr(os, "_exit", killed)
    client = threading.Thread(target=ask_and_end, args=[port], daemon=True)
    client.start()
    server.serve(
        "tiny",
        lambda: (load(*llama), OPTIONS),
        "127.0.0.1",
        port,
        access=Access(),
        settings=ServiceSettings(),
        batch_size=2,
        store=Store(file=file),
    )
    client.join()
    assert file.stat().st_size > 0
