"""Ranks of a group, as threads of this process: what is divided is computed, nothing is sent.

With processes of their own, ranks take seconds to start; see `run_ranks` for those.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest

Result = TypeVar("Result")
ROOT = Path(__file__).parents[2]
SECONDS = 240


class Rank:
    """In the place of an mx.distributed.Group. sums: how often this rank added up."""

    def __init__(self, number: int, ranks: list[Rank], barrier: threading.Barrier) -> None:
        self._number, self._ranks, self._barrier = number, ranks, barrier
        self._part: mx.array | None = None
        self.sums = 0

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return len(self._ranks)

    def add_up(self, part: mx.array) -> mx.array:
        self.sums += 1
        mx.eval(part)
        self._part = part
        self._barrier.wait()
        parts = [rank._part for rank in self._ranks]
        total = sum(parts[1:], parts[0])
        mx.eval(total)
        self._barrier.wait()
        return total


def ranks(count: int) -> list[Rank]:
    """A group of so many."""
    group: list[Rank] = []
    barrier = threading.Barrier(count, timeout=60)
    group.extend(Rank(number, group, barrier) for number in range(count))
    return group


@contextmanager
def adding_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums over ranks are those of threads."""
    with monkeypatch.context() as patch:
        patch.setattr(mx.distributed, "all_sum", lambda part, group=None: group.add_up(part))
        yield


def on_every(group: list[Rank], work: Callable[[Rank], Result]) -> list[Result]:
    """What every rank's thread gives."""

    def run(rank: Rank) -> Result:
        try:
            return work(rank)
        except BaseException:
            rank._barrier.abort()
            raise

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(run, group))


def run_ranks(count: int, module: str, place: Path) -> list[Any]:
    """What every process of a ring on this machine writes as JSON into the file that it is told.

    module: run by `python -m`, with the file as its argument.
    """
    hosts = [[f"127.0.0.1:{port}"] for port in _free_ports(count)]
    (place / "hosts.json").write_text(json.dumps(hosts))
    written = [place / f"rank{number}.json" for number in range(count)]
    common = {**os.environ, "MLX_HOSTFILE": str(place / "hosts.json")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(file)],
            cwd=ROOT,
            env={**common, "MLX_RANK": str(number)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, file in enumerate(written)
    ]
    try:
        told = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    codes = [process.returncode for process in processes]
    assert codes == [0] * count, "\n".join(told)
    return [json.loads(file.read_text()) for file in written]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
