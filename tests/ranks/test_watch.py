"""What ends a process that waits where nothing can interrupt it."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.cli import app as process
from mlx_specdec.errors import OutputError
from mlx_specdec.models.distributed import group
from mlx_specdec.models.distributed.group import Watch, connections, neighbor

from ..support import thread_ranks

WAITS = (
    "import sys, time; from mlx_specdec.models.distributed.group import give_up_after; "
    "give_up_after({seconds}, 'error: nobody came'); print('.', flush=True); time.sleep(60)"
)


def start(seconds: float) -> subprocess.Popen[str]:
    """A process that waits, and gives up after some seconds; returns once it has begun to."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(seconds=seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.read(1) == "."
    return process


def test_whoever_waits_too_long_is_ended_with_the_sentence() -> None:
    process = start(1)
    assert process.communicate(timeout=30)[1] == "error: nobody came\n"
    assert process.returncode == -9


def test_nothing_holds_standard_error_open_once_the_process_is_killed() -> None:
    process = start(30)
    process.kill()
    begun = time.monotonic()
    assert process.communicate(timeout=60)[1] == ""
    assert time.monotonic() - begun < 15


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over a network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        assert connections([server.fileno()]) == []
    with one, other:
        yield one, other


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_is_lost(
    pair: tuple[socket.socket, socket.socket], reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    [ended] = connections([one.fileno()])
    if reset:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    monkeypatch.setattr(group, "GRACE", 0.0)
    with ended:
        assert neighbor(ended, 0, 2) == 1
        lost = threading.Event()
        Watch({ended: 1}, lambda _: lost.set()).start()
        assert lost.wait(10)


def test_a_connection_that_was_refused_is_none() -> None:
    """MLX's ring leaves it open, where the next rank does not listen yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with socket.socket() as refused:
        with pytest.raises(ConnectionRefusedError):
            refused.connect(address)
        assert connections([refused.fileno()]) == []


def test_who_had_reset_a_connection_is_guessed(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["127.0.0.1:1"], [f"127.0.0.1:{one.getpeername()[1]}"]]))
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert neighbor(one, 0, 2) == 1
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    with pytest.raises(OSError):
        one.recv(1)
    assert neighbor(one, 0, 2) == 1


def test_a_rank_that_rank_0_has_left_waits_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[mx.array] = []

    def left(self: group.Ranks, slots: mx.array) -> mx.array:
        waits.append(slots)
        slots[0, : len(group.LEAVING)] = mx.array(list(group.LEAVING.encode()))
        return slots

    monkeypatch.setattr(group.Ranks, "total", left)
    [_, second] = thread_ranks.ranks(2)
    with pytest.raises(SystemExit):
        group.Ranks(second).meet(tmp_path)  # type: ignore[arg-type]
    assert len(waits) == 1


def test_the_watch_says_what_has_become_of_a_rank_that_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Gone:
        def end(self, code: int) -> None:
            raise RuntimeError("[ring] connection to a peer was lost")

        def explain(self) -> None:
            said.append("rank 1 has ended")

    monkeypatch.setattr(process, "_ranks", Gone)
    with pytest.raises(RuntimeError):
        process._end_ranks(0)
    assert said == ["rank 1 has ended"]


def test_a_status_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        group.join(tmp_path)
