"""Commands killed with SIGKILL at random moments of what they write."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLLED_EVERY = 0.001


class Victim:
    """A command that writes into a directory. Seconds count from the first thing on the disk:
    before, a kill could leave nothing. timeout: after which it counts as hanging."""

    def __init__(self, line: list[str], directory: Path, timeout: float | None = None) -> None:
        self._line = line
        self._directory = directory
        self._timeout = timeout

    def run(self) -> tuple[bool, float]:
        """Whether it ends well when it is let alone, and the seconds of its writing."""
        process = self._start()
        begin = time.perf_counter()
        return process.wait(timeout=self._timeout) == 0, time.perf_counter() - begin

    def kills(
        self, count: int, seconds: float, seed: int, prepare: Callable[[], None]
    ) -> Iterator[dict[str, float]]:
        """`count` kills: when each was made, and of how many seconds. seconds: of one that is let
        alone. prepare: called before each."""
        whole = seconds
        draw = random.Random(seed)
        while count:
            prepare()
            moment = draw.uniform(0, whole)
            if not self._kill(moment):
                # It was faster this time, and ended before: no kill. Later ones come earlier.
                whole = min(whole, moment)
                continue
            count -= 1
            yield {"killed_after": round(moment, 3), "of": round(whole, 3)}

    def _start(self) -> subprocess.Popen[bytes]:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(self._line, **silent)
        while process.poll() is None and not any(self._directory.iterdir()):
            time.sleep(POLLED_EVERY)
        return process

    def _kill(self, moment: float) -> bool:
        """Start one and kill it then; whether it was still running."""
        process = self._start()
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return process.returncode == -signal.SIGKILL
