"""SHA-256 of files, computed in a thread of its own while other work reads and writes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .reading import reading

BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """Of one file: its size and what sha256sum gives."""

    nbytes: int
    sha256: str


class Digests:
    """The digests of some files. A context manager: leaving the block ends the work early."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "digests")
        self._all = [(file.name, self._pool.submit(self._one, file)) for file in files]

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def result(self) -> Mapping[str, FileDigest]:
        """File's name -> its digest, once all are there. Raises CheckpointError."""
        ended = ((name, digest.result()) for name, digest in self._all)
        return {name: digest for name, digest in ended if digest is not None}

    def _one(self, file: Path) -> FileDigest | None:
        whole, nbytes, buffer = hashlib.sha256(), 0, memoryview(bytearray(BUFFER_BYTES))
        with reading(file), file.open("rb", buffering=0) as stream:
            while not self._stop.is_set() and (count := stream.readinto(buffer)):
                whole.update(buffer[:count])
                nbytes += count
        return None if self._stop.is_set() else FileDigest(nbytes, whole.hexdigest())


def combined(files: Mapping[str, FileDigest]) -> str:
    """One digest of several files: that of the lines which sha256sum prints of them, by name."""
    lines = (f"{digest.sha256}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
