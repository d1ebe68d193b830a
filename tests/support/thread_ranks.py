"""Ranks of a group, as threads of this process: what is divided is computed, nothing is sent."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import mlx.core as mx
import pytest

Result = TypeVar("Result")


class Rank:
    """A fake of mx.distributed.Group. sums: The number of this rank's sums."""

    def __init__(self, number: int, ranks: list["Rank"], barrier: threading.Barrier) -> None:
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
    """Return a group of ranks."""
    group: list[Rank] = []
    barrier = threading.Barrier(count, timeout=60)
    group.extend(Rank(number, group, barrier) for number in range(count))
    return group


@contextmanager
def adding_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add up over threads instead of processes."""
    with monkeypatch.context() as patch:
        patch.setattr(mx.distributed, "all_sum", lambda part, group=None: group.add_up(part))
        yield


def on_every(group: list[Rank], work: Callable[[Rank], Result]) -> list[Result]:
    """Run `work` in a thread of each rank, and return the results."""

    def run(rank: Rank) -> Result:
        try:
            return work(rank)
        except BaseException:
            rank._barrier.abort()
            raise

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(run, group))


class Line:
    """A group of two in one process: what rank 0 enters, rank 1 gets."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._sent: queue.Queue[mx.array] = queue.Queue()

    def first(self, sent: mx.array) -> mx.array:
        mx.eval(sent)
        self.sizes.append(sent.size)
        self._sent.put(sent)
        return sent

    def second(self, zeros: mx.array) -> mx.array:
        assert not mx.any(zeros).item(), "all but rank 0 bring zeros"
        came = self._sent.get(timeout=10)
        assert came.shape == zeros.shape
        return zeros + came
