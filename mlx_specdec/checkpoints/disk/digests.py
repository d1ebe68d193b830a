"""SHA-256 of files, computed in a thread of its own while other work reads and writes.

Knows files and bytes. Memory holds one buffer; hashing lets Python's other threads run.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ...errors import CheckpointError

BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """Of one file: its size and what sha256sum gives."""

    nbytes: int
    sha256: str


class Digests:
    """The digests of some files. As a context manager: leaving the block ends the work early."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Begin at once."""
        self._files = list(files)
        self._found: dict[str, FileDigest] = {}
        self._problem: CheckpointError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="digests", daemon=True)
        self._thread.start()

    def __enter__(self) -> Digests:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> Mapping[str, FileDigest]:
        """File's name -> its digest, once all are there. Raises CheckpointError for a file that
        cannot be read."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._found

    def _run(self) -> None:
        buffer = bytearray(BUFFER_BYTES)
        for file in self._files:
            try:
                found = self._one(file, memoryview(buffer))
            except OSError as problem:
                self._problem = CheckpointError(f"{file} cannot be read: {problem.strerror}")
                return
            if found is None:
                return
            self._found[file.name] = found

    def _one(self, file: Path, buffer: memoryview) -> FileDigest | None:
        """None where the work was ended."""
        whole, nbytes = hashlib.sha256(), 0
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                if self._stop.is_set():
                    return None
                whole.update(buffer[:count])
                nbytes += count
        return FileDigest(nbytes, whole.hexdigest())


def combined(files: Mapping[str, FileDigest]) -> str:
    """One digest of several files: that of the lines which sha256sum prints of them, by name."""
    lines = (f"{digest.sha256}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
