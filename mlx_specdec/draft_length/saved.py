"""Costs and acceptance rates of pairs, in one JSON file per pair in the cache directory.

A file that cannot be read counts as absent. A file that cannot be written is skipped."""

import contextlib
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import process

FORMAT = 4
"""The layout of the files. It is part of their names, so that other layouts are not read."""
WRITE_EVERY = 10.0
"""Seconds between two writes of a file, because a write takes as long as a round of a small pair.
The end of a process loses the rounds after the last write."""


class Memory:
    """The costs and acceptance rates of one pair. All its completions change them in place.

    Attributes:
        entries: Lists of numbers by name, as the file has them.
        rounds: How many rounds of each kind this process has run; never saved.
        tables: Opened tables of costs by batch size and context; never saved."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file at `path`; None keeps nothing for other processes."""
        self.entries: dict[str, list[Any]] = {}
        self.rounds: Counter[tuple[str | int, ...]] = Counter()
        self.tables: dict[tuple[Any, ...], Any] = {}
        self._path, self._due = path, 0.0
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self.entries = dict(json.loads(path.read_bytes()))

    def save(self) -> None:
        """Write the file, unless it was written within the last WRITE_EVERY seconds."""
        if self._path is not None and self.entries and time.monotonic() >= self._due:
            self._due = time.monotonic() + WRITE_EVERY
            with contextlib.suppress(OSError), process.replacing(self._path) as stream:
                stream.write(json.dumps(self.entries).encode())


_memory = functools.cache(Memory)


def memory(key: Mapping[str, Any]) -> Memory:
    """Return the memory of the pair, device and versions that `key` names."""
    named = json.dumps({**key, "format": FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(named.encode(), digest_size=16)
    return _memory(directory() / f"{digest.hexdigest()}.json")


def directory() -> Path:
    """Return the directory of the files."""
    return process.directory("draft-length")
