"""What texts have taught of a pair, one file for each in the platform's cache directory.

What cannot be read is as good as absent, and what cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import process
from .costs import SIZE, Block

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
        costs = {**self.costs}
        for name, blocks in newer.costs.items():
            costs[name] = {**costs.get(name, {}), **blocks}
        budget = self.budget if newer.budget is None else newer.budget
        return Knowledge(costs, {**self.counts, **newer.counts}, budget)


def directory() -> Path:
    """Return where the files lie."""
    return process.directory("draft-length")


def read(key: Mapping[str, Any]) -> Knowledge:
    """Return what is known of the pair, device and versions that `key` names; nothing where the
    file is not sound."""
    try:
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if content["key"] != dict(key):
            return Knowledge()
        return Knowledge(
            costs={
                name: {_rows(rows): _block(*block) for rows, block in blocks.items()}
                for name, blocks in content["costs"].items()
            },
            counts={name: _counts(counts) for name, counts in content["counts"].items()},
            budget=None if (steps := content["budget"]) is None else _sound(float(steps), 100.0),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Knowledge()


def add(key: Mapping[str, Any], learned: Knowledge) -> None:
    """Put what texts have learned into the file, whole or not at all."""
    known = read(key).updated(learned)
    content = {
        "key": dict(key),
        "costs": {
            name: {
                str(rows): [_rounded(block.mean), _rounded(block.covariance[_LOWER])]
                for rows, block in blocks.items()
            }
            for name, blocks in known.costs.items()
        },
        "counts": {name: counts.round(3).tolist() for name, counts in known.counts.items()},
        "budget": known.budget,
    }
    with contextlib.suppress(OSError, ValueError), process.replacing(_file(key)) as stream:
        stream.write(json.dumps(content, allow_nan=False).encode())


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


def _rows(text: str) -> int:
    rows = int(text)
    if rows < 1:
        raise ValueError("a batch without rows")
    return rows


def _block(mean: list[float], lower: list[float]) -> Block:
    covariance = np.zeros((SIZE, SIZE))
    covariance[_LOWER] = lower
    covariance += np.tril(covariance, -1).T
    block = Block(np.array(mean, dtype=float), covariance)
    if block.mean.shape != (SIZE,):
        raise ValueError("a block of another size")
    _sound(float(np.abs(block.mean).max()), 20.0)
    _sound(float(np.abs(covariance).max()), 100.0)
    if np.linalg.eigvalsh(covariance)[0] < -1e-4:
        raise ValueError("no covariance")
    return block


def _counts(lists: list[list[float]]) -> np.ndarray:
    counts = np.array(lists, dtype=float)
    reached, passed = counts
    if counts.ndim != 2 or not (passed >= 0).all() or not (passed <= reached).all():
        raise ValueError("more accepted than verified")
    _sound(float(reached.max(initial=0.0)), 1e6)
    return counts


def _sound(value: float, most: float) -> float:
    if not math.isfinite(value) or abs(value) > most:
        raise ValueError("out of bounds")
    return value


def _file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16)
    return directory() / f"{digest.hexdigest()}.json"
