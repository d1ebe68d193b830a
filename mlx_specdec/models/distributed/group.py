"""The ranks that share a target: their start, the comparison of their versions and files, and their
end. If a rank ends, the other ranks wait for it in a sum that cannot be interrupted. A thread
therefore watches the sockets that MLX has opened to the neighbors. The end of a process closes
them, and keepalive probes of the kernel detect a broken link. Backends without sockets (MPI, NCCL)
detect both by themselves."""

import atexit
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, cast

import mlx.core as mx

from ...errors import OptionError, SpecdecError, first_line
from ...version import __version__
from ..base import Base
from . import STATUS
from .leader import Leader, LedModel, follow

T = TypeVar("T")
Mode = Literal["tensor", "pipeline"]
SAMPLE = 1 << 16
"""Bytes of each model file that are compared at its beginning, in its middle and at its end."""
COMPARED = (
    *("config.json", "generation_config.json", "tokenizer*", "spiece.model"),
    *("*.safetensors", "pytorch_model*.bin", "*.gguf"),
)
"""The files of a model that the ranks compare."""
LONGEST_MESSAGE = 1024
"""Maximum bytes of a message between ranks; the rest is cut off."""
MEETING = 60.0
"""Seconds that a rank waits for the other ranks when it starts."""
FAILED, REFUSED = 1, 2
"""Exit codes."""
LEAVING = "\0left"
"""The message of rank 0 if it ends before the target is shared."""
INTERVAL = 0.2
"""Seconds between two checks of the neighbors' sockets."""
GRACE = 2.0
"""Seconds that a rank has to execute the order to end after a neighbor's socket was closed."""
SILENT, UNANSWERED = 3, 3
"""Seconds without data after which the kernel sends keepalive probes, one per second, and how many
of these may remain unanswered."""
KEEPALIVE = {
    "TCP_KEEPIDLE": SILENT,
    "TCP_KEEPALIVE": SILENT,  # of macOS
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": UNANSWERED,
    "TCP_USER_TIMEOUT": 1000 * (SILENT + UNANSWERED),
}
_WATCHDOG = """
import os, select, sys
if not select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
    print(sys.argv[3], file=sys.stderr)
    os.kill(int(sys.argv[1]), 9)
"""
"""A program that waits until the pipe to it is closed, or else kills a process after some time."""


class Ranks:
    """The ranks that were started together, at least two. Rank 0 writes the exit code into the file
    that STATUS names. This process ends as soon as a neighbor ends; `neighbors` are file
    descriptors, among them those of the connections to the neighbors."""

    def __init__(self, group: mx.distributed.Group, neighbors: Iterable[int]) -> None:
        self.group = group
        self.rank, self.total = group.rank(), partial(mx.distributed.all_sum, group=group)
        self._leader: Leader | None = None
        self._refused = self._ended = False
        # Written first, because a process that is killed cannot write.
        self._write(FAILED)
        self._watch = Watch(connections(neighbors), self._lost)
        self._watch.start()

    def texts(self, text: str) -> list[str]:
        """Send a message to all ranks, and return the messages of all ranks. Raises SystemExit if
        rank 0 has ended."""
        content = text.encode()[:LONGEST_MESSAGE].ljust(LONGEST_MESSAGE, b"\0")
        slots = mx.zeros((self.group.size(), LONGEST_MESSAGE), dtype=mx.int32)
        slots[self.rank] = mx.array(list(content), dtype=mx.int32)
        rows: list[list[int]] = self.total(slots).tolist()  # type: ignore[assignment]
        texts = [bytes(row).decode(errors="replace").rstrip("\0") for row in rows]
        if self.rank and texts[0] == LEAVING:
            raise SystemExit(REFUSED)
        return texts

    def together(self, work: Callable[[], T]) -> T:
        """Call a function that may fail on only some ranks. If it fails on any rank, raise
        SpecdecError on rank 0 and SystemExit on the other ranks."""
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
        """Raise as `together` does if a rank has other versions, arguments or model files than rank
        0. `model` is the target's directory."""
        versions = f"mlx-specdec {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
        arguments = hashlib.blake2b("\0".join(sys.argv[1:]).encode(), digest_size=8).hexdigest()
        for what, remedy, fact in (
            ("has other versions", "install the same", versions),
            ("was started with other arguments", "give all the same", arguments),
            ("has another model", "copy that of rank 0", _model_digest(model)),
        ):
            first, *rest = self.texts(fact)
            for rank, answer in enumerate(rest, start=1):
                if answer != first:
                    self._refuse(
                        OptionError(
                            f"rank {rank} {what} ({answer}) than rank 0 ({first}): {remedy}"
                        )
                    )

    def share(self, model: Base) -> Base:
        """Return the target for rank 0. The other ranks execute orders and raise SystemExit when
        rank 0 ends."""
        # These trials run passes. All ranks run them now, because no order would do it.
        rows_agree, why_not_batched = model.rows_agree, model.why_not_batched
        if self.rank:
            code = follow(model, self.total)
            self._watch.stop()
            raise SystemExit(code)
        self._leader = Leader(self.total)
        return cast(Base, LedModel(model, self._leader, rows_agree, why_not_batched))

    def end(self, code: int) -> None:
        """End with an exit code. On rank 0, all other ranks end with it as well. Later calls do
        nothing."""
        if self._ended:
            return
        self._ended = True
        if self.rank == 0:
            if self._leader is not None:
                self._leader.end(code)
            elif not self._refused:
                # The other ranks wait for a message.
                self.texts(LEAVING)
            self._write(code)
        self._watch.stop()

    def explain(self) -> None:
        """Wait until the watch has reported that a neighbor ended, because a sum may fail first."""
        self._watch.join(2 * GRACE)

    def end_at_exit(self) -> None:
        with contextlib.suppress(RuntimeError):  # another rank has ended as well
            self.end(FAILED if hasattr(sys, "last_type") else 0)

    def _lost(self) -> None:
        """End this process from the thread of the watch, because the main thread waits in a sum."""
        try:
            if self.rank < 2:
                os.write(2, b"error: another rank has ended, or the link to it is cut\n")
        finally:
            os._exit(FAILED)

    def _write(self, code: int) -> None:
        if self.rank == 0 and STATUS in os.environ:
            Path(os.environ[STATUS]).write_text(f"{code}\n")


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


@cache
def join() -> Ranks:
    """Connect to the ranks that were started together, once. Raises OptionError."""
    before = open_descriptors()
    # Another process kills this one, because MLX holds Python's lock while it waits.
    late = f"error: not all ranks have come within {MEETING:g} seconds: start all together"
    words = [str(os.getpid()), str(MEETING), late]
    watchdog = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCHDOG, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        group = mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as problem:
        raise OptionError(
            f"distributed needs other ranks ({first_line(problem):.100}): start with mlx-specdec "
            "launch, or with mlx.launch"
        ) from None
    finally:
        watchdog.communicate()  # closes the pipe
    if group.size() == 1:
        raise OptionError("distributed needs two ranks or more: this is the only one")
    ranks = Ranks(group, open_descriptors() - before)
    if ranks.rank and threading.current_thread() is threading.main_thread():
        # A terminal sends an interrupt to all ranks, and rank 0 handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(ranks.end_at_exit)
    return ranks


def met() -> Ranks | None:
    """Return the ranks of this process if it has joined them."""
    return join() if join.cache_info().currsize else None


def open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def connections(descriptors: Iterable[int]) -> list[socket.socket]:
    """Return duplicates of the connected network sockets among file descriptors. MLX's ring also
    leaves sockets open whose connection was refused; these have no peer."""
    connected = []
    for descriptor in sorted(descriptors):
        with contextlib.suppress(OSError):
            opened = socket.socket(fileno=descriptor)
            try:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getpeername():
                    connected.append(opened.dup())
            finally:
                opened.detach()
    return connected


class Watch(threading.Thread):
    """A thread that calls `lost`, which is expected to end the process, as soon as one of the
    connections has ended. If a system lacks one of the KEEPALIVE options, a broken link is detected
    later."""

    def __init__(self, neighbors: Sequence[socket.socket], lost: Callable[[], None]) -> None:
        super().__init__(name="watch", daemon=True)
        self._neighbors = neighbors
        self._lost = lost
        self._over = threading.Event()
        for neighbor in neighbors:
            with contextlib.suppress(OSError):  # the connection was reset
                neighbor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE.items():
                    if hasattr(socket, name):
                        neighbor.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def run(self) -> None:
        while not self._over.wait(INTERVAL):
            if any(map(_ended, self._neighbors)):
                # A neighbor that was ordered to end also closes its socket.
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
