"""What sequences that go through the same passes take of memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..assemble import Pair
from ..drafting.drafter import Drafter
from .jobs import Job

SPARE = 1 / 4
"""Of the target's weights: bytes that may lie unused in the caches of a group. Another group costs
another pass over all weights in every round."""


def even(sizes: Sequence[int], spare: float) -> bool:
    """Whether a rectangle with a row for each size, as wide as the largest, is worth its memory: it
    adds at most `spare`, or as much as the rows that are filled up have themselves."""
    longest, whole = max(sizes), sum(sizes)
    return longest * len(sizes) - whole <= max(spare, whole - longest)


class CacheBytes:
    """Bytes of the caches of groups. chosen: who drafts."""

    def __init__(self, pair: Pair, chosen: Sequence[Drafter]) -> None:
        self._models = [pair.target]
        if pair.draft is not None and any(each.name == "draft" for each in chosen):
            self._models.append(pair.draft)
        self._spare = SPARE * pair.target.nbytes

    def even(self, jobs: Sequence[Job]) -> bool:
        """Whether caches of these jobs, as long as they are now, belong into one group."""
        sizes = [self._row(len(job.ids), len(job.sequence.committed)) for job in jobs]
        return even(sizes, self._spare)

    def _row(self, source: int, columns: int) -> int:
        return sum(model.cache_nbytes(source, columns) for model in self._models)
