"""What texts have taught of a pair, one file for each in the platform's cache directory.

A process reads a file once and writes it at most once in WRITE_EVERY seconds, and when it ends: a
short text takes a few times as long as that. What cannot be read is as good as absent, and what
cannot be written is not.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import process
from .costs import SIZE, Block

WRITE_EVERY = 1.0
_LOWER = np.tril_indices(SIZE)


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


@dataclass
class Memory:
    """What the texts of this process have taught, where nothing is read or saved."""

    knowledge: Knowledge = field(default_factory=Knowledge)


def directory() -> Path:
    """Return where the files lie."""
    return process.directory("draft-length")


def read(key: Mapping[str, Any]) -> Knowledge:
    """Return what is known of the pair, device and versions that `key` names; nothing where the
    file is not sound."""
    file = _file(key)
    if file not in _files:
        _files[file] = _File(file, key, _load(file, key))
    return _files[file].known


def add(key: Mapping[str, Any], learned: Knowledge) -> None:
    """Know what texts have learned from now on, and write it when it is time."""
    read(key)
    file = _files[_file(key)]
    file.known = file.known.updated(learned)
    file.unwritten = (file.unwritten or Knowledge()).updated(learned)
    if time.monotonic() >= file.due:
        _write(file)


@dataclass
class _File:
    """unwritten: what the file lacks of what is known. due: when it may be written again."""

    path: Path
    key: Mapping[str, Any]
    known: Knowledge
    unwritten: Knowledge | None = None
    due: float = 0.0


_files: dict[Path, _File] = {}


@atexit.register
def _write_all() -> None:
    for file in _files.values():
        if file.unwritten is not None:
            _write(file)


def _load(file: Path, key: Mapping[str, Any]) -> Knowledge:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        budget = content["budget"]
        _require(content["key"] == key and (budget is None or abs(budget) < 100))
        return Knowledge(
            {
                name: {_rows(rows): _block(*block) for rows, block in blocks.items()}
                for name, blocks in content["costs"].items()
            },
            {name: _counts(*counts) for name, counts in content["counts"].items()},
            budget,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Knowledge()


def _write(file: _File) -> None:
    """Put what the file lacks into it, whole or not at all; others may have written it too."""
    known = _load(file.path, file.key).updated(file.unwritten or Knowledge())
    file.unwritten, file.due = None, time.monotonic() + WRITE_EVERY
    content = {
        "key": file.key,
        "costs": {
            name: {rows: [_short(b.mean), _short(b.covariance[_LOWER])] for rows, b in its.items()}
            for name, its in known.costs.items()
        },
        "counts": {name: [_short(row) for row in its] for name, its in known.counts.items()},
        "budget": known.budget,
    }
    with contextlib.suppress(OSError, ValueError), process.replacing(file.path) as stream:
        stream.write(json.dumps(content, allow_nan=False).encode())


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


def _block(mean: Sequence[float], lower: Sequence[float]) -> Block:
    covariance = np.zeros((SIZE, SIZE))
    covariance[_LOWER] = lower
    covariance += np.tril(covariance, -1).T
    block = Block(np.array(mean, dtype=float), covariance)
    _require(block.mean.shape == (SIZE,) and np.abs(block.mean).max() < 20)
    _require(np.abs(covariance).max() < 100 and np.linalg.eigvalsh(covariance)[0] > -1e-4)
    return block


def _counts(reached: Sequence[float], passed: Sequence[float]) -> np.ndarray:
    counts = np.array([reached, passed], dtype=float)
    _require(counts.ndim == 2 and (counts[1] <= counts[0]).all())
    _require((counts >= 0).all() and (counts < 1e6).all())
    return counts


def _rows(text: str) -> int:
    _require(int(text) > 0)
    return int(text)


def _require(sound: bool | np.bool_) -> None:
    if not sound:
        raise ValueError("the file is not sound")


def _file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16)
    return directory() / f"{digest.hexdigest()}.json"
