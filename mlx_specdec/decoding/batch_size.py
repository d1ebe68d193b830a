"""How many sequences to decode together. Reads no clock: it is told what a stretch took."""

from __future__ import annotations

from typing import Protocol

FIRST = 16
MOST = 64
WORTH_DOUBLING = 1.05
"""Twice as many sequences take twice the memory, and end later."""


class BatchSize(Protocol):
    """Says how many sequences may be decoded together."""

    @property
    def size(self) -> int:
        """How many, from now on."""
        ...

    def took(self, tokens: int, seconds: float) -> None:
        """So many tokens came in so many seconds with `size` sequences."""
        ...


class FixedBatchSize:
    """Always the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def took(self, tokens: int, seconds: float) -> None:
        """Nothing is learned."""


class AutoBatchSize:
    """Doubles while that brings more tokens a second, and halves where that costs none."""

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        self.size = min(first, most)
        self._most = most
        self._rates: dict[int, float] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """As BatchSize says; chooses the next size."""
        self._rates[self.size] = tokens / max(seconds, 1e-9)
        best = min(self._rates)
        for size in sorted(self._rates):
            if self._rates[size] > WORTH_DOUBLING * self._rates[best]:
                best = size
        untried = [size for size in (2 * best, best // 2) if size not in self._rates]
        self.size = next((size for size in untried if 1 <= size <= self._most), best)
