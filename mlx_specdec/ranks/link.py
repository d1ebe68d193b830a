"""Times sums over all ranks on rank 0, of as many tokens as passes have."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..models.base import Base
from .group import Ranks


class LinkTimer:
    """sizes: tokens of the passes. sums: how many follow one another in a pass."""

    def __init__(self, ranks: Ranks, target: Base, sizes: Sequence[int], sums: int) -> None:
        self._ranks = ranks
        self._target = target
        self._sums = sums
        self._seconds: dict[int, list[float]] = {size: [] for size in sorted(set(sizes))}

    def turn(self, times: int = 1) -> None:
        """Time the sums of a pass of every size, `times` over."""
        for _ in range(times):
            for size, taken in self._seconds.items():
                taken.append(self._ranks.time_sums(self._target, size, self._sums) / self._sums)

    def seconds(self) -> dict[int, float]:
        """The median of one sum by the tokens of its pass; empty before the first turn."""
        return {size: median(taken) for size, taken in self._seconds.items() if taken}
