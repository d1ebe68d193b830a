"""Handling of Ctrl-C, which ends a command within two seconds, even while MLX computes.

Python handles signals only between two of its instructions, and a pass of a large model may take
minutes. Therefore a thread ends the process if it still runs a moment after the signal. It does
nothing if a command has set a signal handler."""

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

INTERRUPTED = 130
PATIENCE = 1.5
"""Seconds after an interrupt in which a command may end by itself."""
SLACK = 0.5
"""The largest delay, in seconds, between the command's and the thread's notice of a signal."""

_lock = threading.Lock()
"""Held while the thread judges an interrupt, so that it writes nothing after `go_on`."""
_goes_on_since = float("-inf")
_again = ""
_last_words: Callable[[], str] = str


def watch() -> None:
    """Start the thread. Call this from the main thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), name="interrupts", daemon=True).start()


def go_on() -> None:
    """Record that the command has handled all interrupts so far and continues."""
    global _goes_on_since
    with _lock:
        _goes_on_since = time.monotonic()


def end_at_the_second(line: str) -> None:
    """End the command at the second interrupt that is not handled in time. line: The line to print
    after the first one."""
    global _again
    _again = line


def at_end(line: Callable[[], str]) -> None:
    """Set the line to print when an interrupt ends the command. line: Returns the line, or ""."""
    global _last_words
    _last_words = line


def last_words() -> str:
    """Return the line that `at_end` has set, and forget it."""
    line = _last_words()
    at_end(str)
    return line


def _watch(read: int) -> None:
    """End the process if an interrupt is not handled in time. read: The pipe that gets signals."""
    spared = float("-inf")
    pending: deque[float] = deque()
    while True:
        left = max(0.0, pending[0] + PATIENCE - time.monotonic()) if pending else None
        if select.select([read], [], [], left)[0]:
            if signal.SIGINT in os.read(read, 1):
                pending.append(time.monotonic())
            continue
        came = pending.popleft()
        with _lock:
            handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if handled or _goes_on_since > came - SLACK:
                continue
            if _again and _goes_on_since >= spared:
                spared = came
                _write(f"{_again}\n")
            else:
                # A progress bar hides the cursor.
                _write("\x1b[?25h\n" if os.isatty(2) else "")
                if line := last_words():
                    _write(f"{line}\n")
                os._exit(INTERRUPTED)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
