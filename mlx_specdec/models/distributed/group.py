"""How the ranks that share a target meet, what they compare, and how they end. A rank that is gone
leaves the others in a sum that nothing interrupts. A thread watches the sockets that MLX has opened
to the neighbors: the end of a process closes them, and the kernel asks about a link that is cut.
Backends without sockets (MPI, NCCL) notice by themselves."""

import atexit
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import mlx.core as mx

from ...errors import OptionError, OutputError, SpecdecError, first_line
from ...version import __version__
from ..base import Base
from .leader import Channel, Leader, follow, led

T = TypeVar("T")
Mode = Literal["tensor", "pipeline"]
SAMPLE = 1 << 16
"""Bytes that are read of a model's file, at its beginning, in its middle and at its end."""
COMPARED = (
    *("config.json", "generation_config.json", "tokenizer*", "spiece.model"),
    *("*.safetensors", "pytorch_model*.bin", "*.gguf"),
)
"""The files of a model that are compared."""
LONGEST = 1024
"""Bytes of a rank's text that the others see."""
MEETING = 60.0
"""Seconds in which all ranks have to be started."""
LATE = "not all ranks have come within {:g} seconds: start all together"
FAILED, REFUSED = 1, 2
"""Exit codes."""
LEAVING = "\0left"
"""The text of rank 0 where it ends before the ranks have met."""
INTERVAL = 0.2
"""Seconds between two looks at the neighbors."""
GRACE = 2.0
"""Seconds for a rank that has been ordered to end, but has not got to it yet."""
SILENT, UNANSWERED = 3, 3
"""Seconds of silence after which a kernel asks its neighbor whether it is there, and how many such
questions, one a second, may go unanswered."""
KEEPALIVE = {
    "TCP_KEEPIDLE": SILENT,
    "TCP_KEEPALIVE": SILENT,  # of macOS
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": UNANSWERED,
    "TCP_USER_TIMEOUT": 1000 * (SILENT + UNANSWERED),
}
_WATCHDOG = """
import os, sys, time
parent, seconds, sentence = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(0.2)
    if os.getppid() != parent:
        sys.exit()
print(sentence, file=sys.stderr)
os.kill(parent, 9)
"""


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
        """From now on, end this process when a neighbor is gone. before: file descriptors that were
        open before there were neighbors."""
        self._watch = Watch(connections(open_descriptors() - before), self._lost)
        self._watch.start()

    def total(self, array: mx.array) -> mx.array:
        return mx.distributed.all_sum(array, group=self.group)

    def texts(self, text: str) -> list[str]:
        """Exchange texts with all ranks. Raises SystemExit where rank 0 has ended."""
        content = text.encode()[:LONGEST].ljust(LONGEST, b"\0")
        slots = mx.zeros((self.size, LONGEST), dtype=mx.int32)
        slots[self.rank] = mx.array(list(content), dtype=mx.int32)
        rows: list[list[int]] = self.total(slots).tolist()  # type: ignore[assignment]
        texts = [bytes(row).decode(errors="replace").rstrip("\0") for row in rows]
        if self.rank and texts[0] == LEAVING:
            raise SystemExit(REFUSED)
        return texts

    def together(self, work: Callable[[], T]) -> T:
        """Do something that may fail on one rank alone; then it fails on all, with SpecdecError on
        rank 0 and SystemExit elsewhere."""
        problem: SpecdecError | None = None
        try:
            done = work()
        except SpecdecError as caught:
            problem = caught
        for rank, text in enumerate(self.texts("" if problem is None else str(problem))):
            if text:
                self._refuse(problem or OptionError(f"rank {rank}: {text}"))
        return done

    def _refuse(self, problem: SpecdecError) -> NoReturn:
        self._refused = True
        raise SystemExit(REFUSED) if self.rank else problem

    def meet(self, model: Path) -> None:
        """Raise as `together` where a rank differs from rank 0. model: the target's directory."""
        versions = f"mlx-specdec {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
        arguments = hashlib.blake2b("\0".join(sys.argv[1:]).encode(), digest_size=8).hexdigest()
        for what, remedy, fact in (
            ("has other versions", "install the same", versions),
            ("was started with other arguments", "give all the same", arguments),
            ("has another model", "copy that of rank 0", _model_digest(model)),
        ):
            first, *others = self.texts(fact)
            for rank, other in enumerate(others, start=1):
                if other != first:
                    self._refuse(
                        OptionError(f"rank {rank} {what} ({other}) than rank 0 ({first}): {remedy}")
                    )

    def share(self, model: Base) -> Base:
        """The target as rank 0 uses it; elsewhere SystemExit is raised when rank 0 has ended."""
        channel = Channel(self.total)
        # Passes that nobody orders: all ranks compute these properties together, now.
        model.rows_agree, model.batches  # noqa: B018
        if self.rank:
            code = follow(model, channel)
            self._stop()
            raise SystemExit(code)
        self._leader = Leader(channel)
        return led(model, self._leader)

    def time_sums(self, model: Base, rows: int, count: int) -> float:
        """Seconds of so many sums as a pass over `rows` tokens has them, on rank 0."""
        assert self._leader is not None
        return self._leader.time_sums(model, rows, count)

    def end(self, code: int) -> None:
        """End with an exit code; on rank 0 all others do so too. Once is enough."""
        if self._ended:
            return
        self._ended = True
        if self.rank == 0:
            if self._leader is not None:
                self._leader.end(code)
            elif not self._refused:
                # The others wait for a text.
                self.texts(LEAVING)
            self._write(code)
        self._stop()

    def explain(self) -> None:
        """Wait for the watch: a sum fails as soon as a neighbor is gone, before it has looked."""
        if self._watch is not None:
            self._watch.join(2 * GRACE)

    def end_at_exit(self) -> None:
        with contextlib.suppress(RuntimeError):  # another rank is gone as well
            self.end(FAILED if hasattr(sys, "last_type") else 0)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _lost(self) -> None:
        """In the thread that watches: nothing else can end this process now."""
        try:
            if self.rank < 2:
                os.write(2, b"error: another rank has ended, or the link to it is cut\n")
        finally:
            os._exit(FAILED)

    def _write(self, code: int) -> None:
        if self.rank == 0 and self._status is not None:
            with _writing(self._status):
                self._status.write_text(f"{code}\n")


def _model_digest(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted({file for pattern in COMPARED for file in directory.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in sorted({0, size // 2, max(0, size - SAMPLE)}):
                stream.seek(place)
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


@contextlib.contextmanager
def _writing(status: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(f"status-file {status} cannot be written: {problem.strerror}") from None


_met: list[Ranks] = []
"""MLX has one group of ranks a process."""


def met() -> Ranks | None:
    return _met[0] if _met else None


def join(status: Path | None = None) -> Ranks:
    """Meet the ranks that were started together. status: see Ranks. Raises OptionError."""
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
        # A terminal interrupts all; rank 0 reports it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _met.append(ranks)
    atexit.register(ranks.end_at_exit)
    return ranks


def give_up_after(seconds: float, sentence: str) -> Callable[[], None]:
    """Print a sentence and kill this process after some seconds, unless what this returns is called
    before. MLX holds Python's lock while it waits for others, so another process has to do it."""
    words = [str(os.getpid()), str(seconds), sentence]
    watchdog = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCHDOG, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )

    def cancel() -> None:
        watchdog.kill()
        watchdog.wait()

    return cancel


def open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def connections(descriptors: Iterable[int]) -> list[socket.socket]:
    """Duplicates of the sockets among file descriptors that are connected over a network. MLX's
    ring leaves some open whose connection was refused: these have no peer."""
    connected = []
    for descriptor in sorted(descriptors):
        with contextlib.suppress(OSError):
            each = socket.socket(fileno=descriptor)
            try:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                    connected.append(each.dup())
            finally:
                each.detach()
    return connected


class Watch(threading.Thread):
    """Calls `lost` once one of these connections has ended; the process is expected to end in it.
    Where a system lacks an option, links that are cut are noticed later."""

    def __init__(self, neighbors: Sequence[socket.socket], lost: Callable[[], None]) -> None:
        super().__init__(name="watch", daemon=True)
        self._neighbors = neighbors
        self._lost = lost
        self._over = threading.Event()
        for each in neighbors:
            with contextlib.suppress(OSError):  # reset meanwhile
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE.items():
                    if hasattr(socket, name):
                        each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def run(self) -> None:
        while not self._over.wait(INTERVAL):
            if any(map(_ended, self._neighbors)):
                # An end that was ordered looks alike from here.
                if not self._over.wait(GRACE):
                    self._lost()
                return

    def stop(self) -> None:
        self._over.set()


def _ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
