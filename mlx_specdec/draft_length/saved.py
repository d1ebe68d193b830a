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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import process
from .costs import Block

WRITE_EVERY = 1.0
"""Seconds between two writings of a file, which take as long as two rounds of a small pair."""


@dataclass(frozen=True)
class Knowledge:
    """costs: by source and size of batch. counts: of tokens verified and accepted, (2, most), by
    source. budget: for trials, in plain steps; None where no text came before."""

    costs: Mapping[str, Mapping[int, Block]] = field(default_factory=dict)
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    budget: float | None = None

    def updated(self, newer: Knowledge) -> Knowledge:
        """Return this with all that the newer one knows."""
        costs = {n: {**self.costs.get(n, {}), **its} for n, its in newer.costs.items()}
        budget = self.budget if newer.budget is None else newer.budget
        return Knowledge({**self.costs, **costs}, {**self.counts, **newer.counts}, budget)


class Memory:
    """What is known now. path: a file that is read once, and written at most every WRITE_EVERY
    seconds and when the process ends; None keeps nothing for other processes."""

    def __init__(self, path: Path | None = None) -> None:
        self.knowledge = Knowledge() if path is None else _read(path)
        self._path, self._due = path, 0.0
        self._unwritten: Knowledge | None = None

    def add(self, learned: Knowledge) -> None:
        """Know what texts have learned."""
        self.knowledge = self.knowledge.updated(learned)
        self._unwritten = (self._unwritten or Knowledge()).updated(learned)
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Put what the file lacks into it, whole or not at all; others may have written it too."""
        if self._path is None or self._unwritten is None:
            return
        known = _read(self._path).updated(self._unwritten)
        self._unwritten, self._due = None, time.monotonic() + WRITE_EVERY
        blocks = [(n, r, block) for n, its in known.costs.items() for r, block in its.items()]
        arrays = {f"costs {rows} {name}": np.vstack(block) for name, rows, block in blocks}
        arrays |= {f"counts {name}": counts for name, counts in known.counts.items()}
        arrays |= {} if known.budget is None else {"budget": np.array(known.budget)}
        with contextlib.suppress(OSError), process.replacing(self._path) as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]


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


def _read(path: Path) -> Knowledge:
    """Of what a file holds the checksums of its format and the versions in its name answer."""
    costs: dict[str, dict[int, Block]] = {}
    counts: dict[str, np.ndarray] = {}
    budget = None
    try:
        with path.open("rb") as stream, np.load(stream) as arrays:
            for name, values in arrays.items():
                kind, _, rest = name.partition(" ")
                if kind == "costs":
                    rows, _, source = rest.partition(" ")
                    costs.setdefault(source, {})[int(rows)] = Block(values[0], values[1:])
                elif kind == "counts":
                    counts[rest] = values
                else:
                    budget = float(values)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return Knowledge()
    return Knowledge(costs, counts, budget)
