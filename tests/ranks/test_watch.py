"""What ends a process that waits where nothing can interrupt it."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import OutputError
from mlx_specdec.models.distributed import group
from mlx_specdec.models.distributed.group import Watch, connections

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
    monkeypatch.setattr(group, "GRACE", 0.0)
    with ended:
        lost = threading.Event()
        Watch([ended], lost.set).start()
        assert lost.wait(10)


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


def test_a_status_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        group.join(tmp_path)
