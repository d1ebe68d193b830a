"""The costs of rounds, learned from their seconds. Each pair has one JSON file of costs and
acceptance rates in the cache directory. A file that cannot be read counts as
absent. A file that cannot be written is skipped."""

import contextlib
import functools
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import system

LONGEST_DRAFT = 16
"""The longest draft of a proposer with weights, in tokens, and the longest that is timed."""
FIRST_TRIAL = 16
"""Rounds before the first trial."""
RISE, LINE_WEIGHT = 0.25, 8.0
"""Plain steps that a draft token is assumed to cost before any round was timed. The line through
all costs weighs as much as LINE_WEIGHT rounds in the cost of each draft length."""
HEAVIEST, AGED, LEAST_WEIGHT = 20.0, 0.99, 1.5
"""The largest weight of timed rounds, the factor by which `CostTable.fit` reduces all weights, and
the weight from which costs count: the first round may have stalled."""
STALL = 1.0
"""If a later round takes more than 1 + STALL times the expected seconds, it counts as 1 + STALL
times them. If it takes less than 1 - STALL / 2 times the mean of one or two earlier rounds, these
have stalled."""
COSTS_FORMAT = 4
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
            with contextlib.suppress(OSError), system.replacing(self._path) as stream:
                stream.write(json.dumps(self.entries).encode())


_memory = functools.cache(Memory)


def memory(key: Mapping[str, Any]) -> Memory:
    """Return the memory of the pair, device and versions that `key` names."""
    named = json.dumps({**key, "format": COSTS_FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(named.encode(), digest_size=16)
    return _memory(directory() / f"{digest.hexdigest()}.json")


def directory() -> Path:
    """Return the directory of the files."""
    return system.cache_directory("draft-length")


class CostTable:
    """Costs of rounds in groups of one size, after contexts of one length.

    An entry is the logarithm of a round's usual seconds, and the weight of the timed rounds. The
    name of plain steps is "".

    Attributes:
        trials: Rounds until the next trial, and how often a trial was due.
        doublings: 0 for contexts of less than 1,024 tokens, 1 from there, and one more whenever
            the context doubles.
        ratios: Cost ratios of draft lengths 0 .. LONGEST_DRAFT by `Candidate.costs`; see `fit`."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved table. If there is none, copy the costs of the nearest size after contexts
        that are not longer, with little weight. The first timed round then scales all of them.
        names: `Candidate.costs` of all proposers."""
        trials = f"trials of {rows} rows, {doublings} doublings"
        self._copied = trials not in memory.entries
        self.trials = memory.entries.setdefault(trials, [FIRST_TRIAL, 0])
        self.doublings, self._costs = doublings, {}
        self.ratios: dict[str, list[float]] = {}
        for name in ("", *names):
            keys = [
                f"costs of {name}, {1 << n} rows, {more} doublings"
                for n in sorted(range(10), key=lambda n: abs((1 << n) - rows))
                for more in range(doublings, -1, -1)
            ]
            saved = (memory.entries[key] for key in keys if key in memory.entries)
            timed = (costs for costs in saved if any(weight for _, weight in costs))
            costs = next(timed, [[0.0, 0.0]] * (LONGEST_DRAFT + 1))
            default = [[cost, min(weight, 1.0)] for cost, weight in costs]
            self._costs[name] = memory.entries.setdefault(keys[0], default)
        self.fit()

    @property
    def ready(self) -> bool:
        """Whether enough plain steps were timed to compare drafts with them."""
        return bool(self.entry("", 0)[1] > LEAST_WEIGHT)

    def known(self, name: str) -> bool:
        """Whether the costs of a proposer count: as a rule, two rounds were timed."""
        return sum(weight for _, weight in self._costs[name]) > LEAST_WEIGHT

    @property
    def seconds(self) -> float:
        """Usual seconds of a plain step."""
        return math.exp(self.entry("", 0)[0])

    def entry(self, name: str, drafted: int) -> list[Any]:
        """Return the entry of a round; `name` is `Candidate.costs`."""
        return self._costs[name if drafted else ""][drafted]

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round of a proposer, or from a plain step if `drafted` is 0."""
        entry = self.entry(name, drafted)
        if self._copied:
            self._copied, shift = False, math.log(seconds) - entry[0]
            for entries in self._costs.values():
                for other in entries:
                    other[0] += shift
        excess = seconds / math.exp(entry[0]) - 1
        if entry[1]:
            excess = min(excess, STALL)
        stalled = entry[1] < 3 and excess < -STALL / 2
        entry[0] += math.log1p(excess if stalled else excess / (1 + entry[1]))
        entry[1] = min(entry[1] + 1, HEAVIEST)

    def fit(self) -> None:
        """Let earlier rounds lose some weight, and compute `ratios`. A ratio is the weighted mean
        of the length's own timings and of the line that fits all lengths best. The line begins as
        1 + RISE n. Costs that are not `known` do not count."""
        plain = self.entry("", 0)[0]
        for name, entries in self._costs.items():
            for entry in entries:
                entry[1] *= AGED
            if not name:
                continue
            known = self.known(name)
            timed = [(math.exp(cost - plain), weight * known) for cost, weight in entries]
            points = [(1, 1 + RISE, 0.5), (LONGEST_DRAFT, 1 + LONGEST_DRAFT * RISE, 0.5)]
            points += [(n, *timed[n]) for n in range(1, LONGEST_DRAFT + 1)]
            # The noise of a round grows with its seconds.
            points = [(n, ratio, weight / (1 + RISE * n) ** 2) for n, ratio, weight in points]
            total = sum(weight for _, _, weight in points)
            middle = sum(weight * n for n, _, weight in points) / total
            height = sum(weight * ratio for _, ratio, weight in points) / total
            slope = sum(weight * (n - middle) * (ratio - height) for n, ratio, weight in points)
            slope = max(0.0, slope / sum(weight * (n - middle) ** 2 for n, _, weight in points))
            lines = (max(1.0, height + slope * (n - middle)) for n in range(1, LONGEST_DRAFT + 1))
            self.ratios[name] = [1.0] + [
                (weight * ratio + LINE_WEIGHT * line) / (weight + LINE_WEIGHT)
                for (ratio, weight), line in zip(timed[1:], lines, strict=True)
            ]
