"""What ranks compare before they work together: versions, arguments, a model's files."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeVar

import mlx.core as mx

from ... import __version__
from ...errors import OptionError, OutputError, SpecdecError, first_line
from ..base import Base
from .leader import Leader, follow, led
from .orders import Channel
from .watch import GRACE, Watch, connections, give_up_after, neighbor, open_descriptors

SAMPLE = 1 << 16
"""Bytes that are read of a large file, at its beginning, in its middle and at its end."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
TOLD = ("config.json", "tokenizer*", "spiece.model", "generation_config.json")


def _versions() -> str:
    """Of all that computes."""
    return f"mlx-specdec {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"


def _arguments() -> str:
    """What stands for the command line of this process."""
    return hashlib.blake2b("\0".join(sys.argv[1:]).encode(), digest_size=8).hexdigest()


def _model_digest(directory: Path) -> str:
    """What stands for the files of a model: all of the small ones, samples of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted({f for pattern in (*TOLD, *WEIGHTS) for f in directory.glob(pattern)}):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for part in _samples(file):
            digest.update(part)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        for place in sorted({0, max(0, size // 2), max(0, size - SAMPLE)}):
            stream.seek(place)
            yield stream.read(SAMPLE)


T = TypeVar("T")
Mode = Literal["tensor", "pipeline"]
LONGEST = 1024
"""Bytes of what a rank tells, and all that is left of more."""
MEETING = 60.0
"""Seconds in which all ranks have to be started."""
LATE = "not all ranks have come within {:g} seconds: start all together"
FAILED = 1
REFUSED = 2
LEAVING = "\0left"
"""What rank 0 tells where it ends before the ranks have met."""


class Ranks:
    """group: of MLX, more than one. status: a file for the exit code; rank 0 writes it."""

    def __init__(self, group: mx.distributed.Group, status: Path | None = None) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._status = status
        self._leader: Leader | None = None
        self._watch: Watch | None = None
        self._refused = self._ended = False
        # Whoever is killed does not write any more.
        self._write(FAILED)

    def watch(self, before: set[int]) -> None:
        """From now on, end this process when a neighbor is gone. before: file descriptors that
        are no connections to neighbors."""
        connected = connections(open_descriptors() - before)
        self._neighbors = {
            each.fileno(): neighbor(each, self.rank, self.size) for each in connected
        }
        self._watch = Watch(connected, self._lost)
        self._watch.start()

    def total(self, array: mx.array) -> mx.array:
        """The sum of an array over all ranks, lazily."""
        return mx.distributed.all_sum(array, group=self.group)

    def texts(self, own: str) -> list[str]:
        """What each rank tells. Waits for all. Raises SystemExit where rank 0 has ended."""
        told = own.encode()[:LONGEST].ljust(LONGEST, b"\0")
        slots = mx.zeros((self.size, LONGEST), dtype=mx.int32)
        slots[self.rank] = mx.array(list(told), dtype=mx.int32)
        rows: list[list[int]] = self.total(slots).tolist()  # type: ignore[assignment]
        texts = [bytes(row).decode(errors="replace").rstrip("\0") for row in rows]
        if self.rank and texts[0] == LEAVING:
            raise SystemExit(REFUSED)
        return texts

    def together(self, work: Callable[[], T]) -> T:
        """Do something that may fail on one rank alone; then it fails on all. Raises SpecdecError
        on rank 0, and SystemExit elsewhere: one line is enough."""
        problem: SpecdecError | None = None
        try:
            done = work()
        except SpecdecError as caught:
            problem = caught
        told = self.texts("" if problem is None else str(problem))
        if not any(told):
            return done
        self._refused = True
        if self.rank:
            raise SystemExit(REFUSED)
        if problem is not None:
            raise problem
        rank = next(rank for rank, text in enumerate(told) if text)
        raise OptionError(f"rank {rank}: {told[rank]}")

    def meet(self, model: Path) -> None:
        """Raises as `together` does where a rank computes with something else than rank 0.
        model: the directory of the target."""
        self._compare("has other versions", "install the same", _versions())
        self._compare("was started with other arguments", "give all the same", _arguments())
        self._compare("has another model", "copy that of rank 0", _model_digest(model))

    def _compare(self, what: str, remedy: str, own: str) -> None:
        told = self.texts(own)

        def check() -> None:
            other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
            if other is not None:
                raise OptionError(
                    f"rank {other} {what} ({told[other]}) than rank 0 ({told[0]}): {remedy}"
                )

        self.together(check)

    def share(self, model: Base) -> Base:
        """The target as this rank uses it. Returns on rank 0 alone; elsewhere SystemExit is raised
        when rank 0 has ended."""
        channel = Channel(self.rank, self.total)
        # Passes that nobody orders: all ranks find out together what is kept from then on.
        model.rows_agree, model.batches  # noqa: B018
        if self.rank:
            code = follow(model, channel)
            self._stop()
            raise SystemExit(code)
        self._leader = Leader(channel)
        return led(model, self._leader)

    def time_sums(self, model: Base, rows: int, count: int) -> float:
        """Seconds of so many sums over all ranks, one behind another, as a pass over `rows` tokens
        has them. On rank 0, once the target is shared. model: the target."""
        assert self._leader is not None
        return self._leader.time_sums(model, rows, count)

    def end(self, code: int) -> None:
        """This process ends with a code; on rank 0 all do. Once is enough."""
        if self._ended:
            return
        self._ended = True
        if self.rank == 0:
            if self._leader is not None:
                self._leader.end(code)
            elif not self._refused:
                # The others wait for the first thing that is told.
                self.texts(LEAVING)
            self._write(code)
        self._stop()

    def explain(self) -> None:
        """Called where something has failed without a sentence of its own: a sum fails as soon as
        a neighbor is gone, before the watch has looked. Returns where none is."""
        if self._watch is not None:
            self._watch.join(2 * GRACE)

    def end_at_exit(self) -> None:
        """Where nobody has said how a program ends."""
        with contextlib.suppress(RuntimeError):  # another rank is gone as well
            self.end(FAILED if hasattr(sys, "last_type") else 0)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _lost(self, connection: socket.socket) -> None:
        """In the thread that watches: nothing else can end this process now."""
        try:
            gone = self._neighbors[connection.fileno()]
            # One line from all that are left.
            if self.rank == 0 or (self.rank == 1 and gone == 0):
                _last_words(
                    f"rank {gone} has ended, or has lost another rank, or the link to it is cut"
                )
        finally:
            os._exit(FAILED)

    def _write(self, code: int) -> None:
        if self.rank or self._status is None:
            return
        with _writing(self._status):
            self._status.write_text(f"{code}\n")


@contextlib.contextmanager
def _writing(status: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(f"status-file {status} cannot be written: {problem.strerror}") from None


def _last_words(sentence: str) -> None:
    os.write(2, f"error: {sentence}\n".encode())


_met: list[Ranks] = []
"""MLX has one group of ranks a process."""


def met() -> Ranks | None:
    """The ranks that this process is one of, once it has met them."""
    return _met[0] if _met else None


def join(status: Path | None = None) -> Ranks:
    """Meet the ranks that were started together. status: see Ranks.

    Raises OptionError where there are none, or where they do not come.
    """
    if _met:
        return _met[0]
    if status is not None:
        # What an earlier run has left says nothing of this one.
        with _writing(status):
            status.unlink(missing_ok=True)
    before = open_descriptors()
    cancel = give_up_after(MEETING, f"error: {LATE.format(MEETING)}")
    try:
        group = mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as problem:
        raise OptionError(
            f"distributed needs other ranks ({first_line(problem):.100}): start with mlx-specdec "
            "launch, or with mlx.launch"
        ) from None
    finally:
        cancel()
    if group.size() == 1:
        raise OptionError("distributed needs two ranks or more: this is the only one")
    ranks = Ranks(group, status)
    ranks.watch(before)
    if ranks.rank and threading.current_thread() is threading.main_thread():
        # A terminal interrupts all; what becomes of it rank 0 says.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _met.append(ranks)
    atexit.register(ranks.end_at_exit)
    return ranks
