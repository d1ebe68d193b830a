"""Notices that another rank is gone, while this one waits for it in a sum that nothing interrupts.

The sockets are those that MLX has opened to its neighbors: the end of a process closes them, and of
a link that is cut the kernel is told to ask. Nothing is sent or read here. Backends without sockets
(MPI, NCCL) notice by themselves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable

INTERVAL = 0.2
"""Seconds between two looks."""
GRACE = 2.0
"""Seconds for a rank that has been told the end, but has not got to it yet."""
SILENT, ASKED_EVERY, UNANSWERED = 3, 1, 3
"""Seconds of silence after which a kernel asks its neighbor whether it is there, seconds between
two such questions, and how many may go unanswered."""
UNACKNOWLEDGED_MS = 1000 * (SILENT + ASKED_EVERY * UNANSWERED)
_OPTIONS = {
    "TCP_KEEPIDLE": SILENT,
    "TCP_KEEPALIVE": SILENT,  # of macOS
    "TCP_KEEPINTVL": ASKED_EVERY,
    "TCP_KEEPCNT": UNANSWERED,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS,
}


def open_descriptors() -> set[int]:
    """The file descriptors of this process."""
    return {int(name) for name in os.listdir("/dev/fd")}


def connections(descriptors: Iterable[int]) -> list[socket.socket]:
    """Return duplicates of the sockets among file descriptors that are connected over a network.

    MLX's ring leaves sockets open whose connection was refused, since the next rank had not begun
    to listen: these are no connections. One that was reset already looks the same; the next sum
    over it fails by itself.
    """
    connected = []
    for descriptor in sorted(descriptors):
        with contextlib.suppress(OSError):
            each = socket.socket(fileno=descriptor)
            try:
                if _connects(each):
                    connected.append(each.dup())
            finally:
                each.detach()
    return connected


def _connects(each: socket.socket) -> bool:
    if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
        return False
    try:
        each.getpeername()
    except OSError:
        return False
    return True


class Watch(threading.Thread):
    """Calls `lost` with the first connection that has ended; the process is expected to end in it.
    Where a system lacks an option, links that are cut are noticed later.
    """

    def __init__(
        self, connected: Iterable[socket.socket], lost: Callable[[socket.socket], None]
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._connected = list(connected)
        self._lost = lost
        self._over = threading.Event()
        for each in self._connected:
            with contextlib.suppress(OSError):  # reset meanwhile
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _OPTIONS.items():
                if hasattr(socket, name):
                    with contextlib.suppress(OSError):
                        each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def run(self) -> None:
        """In its own thread."""
        while not self._over.wait(INTERVAL):
            ended = next(filter(_ended, self._connected), None)
            if ended is not None:
                # The end that everybody was told looks alike from here.
                if not self._over.wait(GRACE):
                    self._lost(ended)
                return

    def stop(self) -> None:
        """The end has come, and is no loss."""
        self._over.set()


def _ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def neighbor(connection: socket.socket, rank: int, size: int) -> int:
    """The rank at the other end of a connection. In a ring every rank has called the next one; of a
    connection that was reset already nobody knows, and it is taken for the one before."""
    file = os.environ.get("MLX_HOSTFILE")
    if file is None:
        return 0 if rank else 1
    with open(file, encoding="utf-8") as stream:
        hosts: list[list[str]] = json.load(stream)
    following = (rank + 1) % size
    ports = {address.rpartition(":")[2] for address in hosts[following]}
    try:
        called = str(connection.getpeername()[1]) in ports
    except OSError:
        called = False
    return following if called else (rank - 1) % size


def give_up_after(seconds: float, sentence: str) -> Callable[[], None]:
    """Print a sentence and end this process in a while, unless what this returns is called before.

    MLX holds Python's lock while it waits for others to call, so that no thread could do it. The
    process that does it leaves soon after this one has: it holds this one's standard error open,
    and whoever reads that to its end would wait.
    """
    # Some containers have no ps.
    script = (
        'parent() { ps -o ppid= -p $$ 2>/dev/null || cut -d " " -f 4 /proc/$$/stat; }; '
        'own() { [ "$(parent | tr -d " ")" = "$3" ]; }; left=$1; '
        'while [ "$left" -gt 0 ]; do sleep 0.5; own "$@" || exit 0; left=$((left - 1)); done; '
        'echo "$2" >&2; kill -9 "$3"'
    )
    told = [str(math.ceil(2 * seconds)), sentence, str(os.getpid())]
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, "-", *told],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )

    def cancel() -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    return cancel
