"""Start a server for measurements, and send it requests."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 120.0


@dataclass(frozen=True)
class Served:
    """A server on this machine. process: the one that was started."""

    port: int
    process: subprocess.Popen[bytes]

    def connect(self, seconds: float = PATIENCE) -> http.client.HTTPConnection:
        """Return a connection that waits so long for an answer."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status and the body of an answer, on a new connection."""
        connection = self.connect()
        try:
            connection.request(method, path, body, {"Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a completion. Raises RuntimeError if the status is not 200."""
        status, content = self.ask("POST", "/v1/completions", json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{status}: {content.decode('utf-8', 'replace')[:300]}")
        return json.loads(content)

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)

    def open_files_and_threads(self) -> dict[str, int]:
        """Count open files and threads of the process; return nothing without /proc."""
        entry = Path("/proc", str(self.process.pid))
        if not entry.is_dir():
            return {}
        counted = {"files": entry / "fd", "threads": entry / "task"}
        return {name: len(list(place.iterdir())) for name, place in counted.items()}


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[Served]:
    """Start a server that will listen on `port`, wait until it is ready, and end it at last."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    served = Served(port, process)
    try:
        _wait(served)
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(served: Served) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if served.process.poll() is not None:
            sys.exit(f"the server ended with {served.process.returncode} before it was ready")
        try:
            if served.ask("GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"the server was not ready after {PATIENCE:.0f} s")
