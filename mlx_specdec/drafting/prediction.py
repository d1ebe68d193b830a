"""Drafts from a text that the caller expects, more or less: what comes next in it is proposed.

After an edit it goes on where the newest tokens are found in it again, further on if possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from ..contracts import Noise, Proposal, Proposer
from .drafter import Drafter

NAME = "prediction"
SHORTEST = 3
"""Tokens that say where in the expected text the written one is."""


def drafter(expected: Sequence[int]) -> Drafter:
    """Of one request. expected: token ids; none at all abstain."""
    return Drafter(NAME, lambda asked, first: Prediction(expected))


class Prediction(Proposer):
    """Proposer that knows what may be written. Its proposals are one-hot."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(SHORTEST, len(self._expected) + 1):
            self._after[tuple(self._expected[end - SHORTEST : end])].append(end)
        self._prompt: list[int] = []
        self._begun = False
        self._place: int | None = 0
        self._furthest = 0
        self._read = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets the last sequence."""
        [self._prompt] = map(list, prompts)
        self._begun, self._place, self._furthest, self._read = False, 0, 0, 0

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether the text is somewhere in the expected one."""
        return bool(self._continuation(committed[0], limit))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What comes next in the expected text."""
        return Proposal.one_hot([self._continuation(committed[0], limit)])

    def _continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if not self._expected:
            return []
        if not self._begun:
            # An encoder-decoder model's prompt is no part of what it writes.
            whole = list(committed[: len(self._prompt)]) == self._prompt
            self._read, self._begun = len(self._prompt) if whole else 1, True
        for end in range(self._read + 1, len(committed) + 1):
            self._follow(committed, end)
        self._read = len(committed)
        return [] if self._place is None else self._expected[self._place : self._place + limit]

    def _follow(self, committed: Sequence[int], end: int) -> None:
        """One more token was written: `committed[end - 1]`."""
        place = self._place
        if place is not None and self._expected[place : place + 1] == [committed[end - 1]]:
            self._place = place + 1
        else:
            places = self._after.get(tuple(committed[end - SHORTEST : end]), [])
            further = bisect_left(places, self._furthest)
            self._place = places[min(further, len(places) - 1)] if places else None
        self._furthest = max(self._furthest, self._place or 0)
