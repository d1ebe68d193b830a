"""What texts have taught of a pair: a file for each in the platform's cache directory.

What cannot be read is as good as absent, and what cannot be written is not."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import process
from .costs import Block
from .first_rounds import FirstRounds

WRITE_EVERY = 1.0
"""Seconds between two writings of a file, which take as long as two rounds of a small pair."""


Knowledge = Mapping[str, np.ndarray]
"""Arrays by name: "budget", for trials, in plain steps; of a source "counts TEXT", of tokens that
were verified and accepted, (2, most), and for each size of batch "costs ROWS COSTS", a Block's
mean and covariance, (1 + SIZE, SIZE)."""


def costs_of(knowledge: Knowledge, source: str) -> dict[int, Block]:
    """Return what is known of a source's rounds, by size of batch, which are powers of two."""
    arrays = {1 << n: knowledge.get(f"costs {1 << n} {source}") for n in range(16)}
    return {rows: Block(its[0], its[1:]) for rows, its in arrays.items() if its is not None}


def as_knowledge(costs: Mapping[str, Mapping[int, Block]]) -> dict[str, np.ndarray]:
    """Return the opposite of `costs_of`, for several sources."""
    each = ((n, rows, block) for n, its in costs.items() for rows, block in its.items())
    return {f"costs {rows} {name}": np.vstack(block) for name, rows, block in each}


class Memory:
    """What is known now. path: a file that is read once, and written at most every WRITE_EVERY
    seconds and when the process ends; None keeps nothing for other processes. first_rounds: never
    saved, since each process compiles its kernels."""

    def __init__(self, path: Path | None = None) -> None:
        self.first_rounds = FirstRounds()
        self.knowledge: Knowledge = {} if path is None else _read(path)
        self._path, self._due = path, 0.0
        self._unwritten: Knowledge = {}

    def add(self, learned: Knowledge) -> None:
        """Know what texts have learned."""
        self.knowledge = {**self.knowledge, **learned}
        self._unwritten = {**self._unwritten, **learned}
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Put what the file lacks into it, whole or not at all; others may have written it too."""
        if self._path is None or not self._unwritten:
            return
        known = {**_read(self._path), **self._unwritten}
        self._unwritten, self._due = {}, time.monotonic() + WRITE_EVERY
        with contextlib.suppress(OSError), process.replacing(self._path) as stream:
            np.savez(stream, **known)  # type: ignore[arg-type]


_memories: dict[Path, Memory] = {}


@atexit.register
def _write_all() -> None:
    for memory in _memories.values():
        memory.write()


def memory(key: Mapping[str, Any]) -> Memory:
    """Return what is known of the pair, device and versions that `key` names."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16)
    path = directory() / f"{digest.hexdigest()}.npz"
    if path not in _memories:
        _memories[path] = Memory(path)
    return _memories[path]


def directory() -> Path:
    """Return where the files lie."""
    return process.directory("draft-length")


def _read(path: Path) -> dict[str, np.ndarray]:
    """Of what a file holds the checksums of its format and the versions in its name answer."""
    try:
        with path.open("rb") as stream, np.load(stream) as arrays:
            return {name: array.astype(float) for name, array in arrays.items()}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
