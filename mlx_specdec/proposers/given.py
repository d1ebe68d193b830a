"""What a grammar leaves no choice about is proposed: keys, brackets, quotes.

It costs microseconds, and where the grammar writes them in one way only, no token is rejected.
Source of the idea: fast-forward tokens of llguidance (docs/fast_forward.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..interfaces import Model, Noise, Proposal, Proposer
from ..sampling.constraint import Constraint
from .drafter import Drafter, LoadedPair, Setup

FORCED = "forced"


def drafter(pair: LoadedPair) -> Drafter:
    """Of every pair; it abstains in texts without a constraint."""

    def make(setup: Setup) -> Forced:
        return Forced(pair.target, lambda: pair.constraint(setup.options.constraint))

    return Drafter(FORCED, make)


class Forced(Proposer):
    """Proposer that asks a constraint of its own. Its proposals are one-hot: they have no rows.

    target: says where a text begins. make: a constraint of a text that has not begun, None where
    nothing binds it.
    """

    def __init__(self, target: Model, make: Callable[[], Constraint | None]) -> None:
        self._target = target
        self._make = make
        self._constraint: Constraint | None = None
        self._read = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets the last sequence."""
        [prompt] = prompts
        self._constraint = self._make()
        self._read = len(self._target.prefix(prompt))

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether anything is forced now."""
        return bool(self._forced(committed[0]))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """The first of the tokens that must come."""
        return Proposal.one_hot([self._forced(committed[0])[:limit]])

    def _forced(self, committed: Sequence[int]) -> list[int]:
        if self._constraint is None:
            return []
        self._constraint.take(committed[self._read :])
        self._read = len(committed)
        return self._constraint.forced()


PREDICTION = "prediction"
SHORTEST = 3
"""Tokens that say where in the expected text the written one is."""


def predicting(expected: Sequence[int]) -> Drafter:
    """Of one request. expected: token ids; none at all abstain."""
    return Drafter(PREDICTION, lambda setup: Prediction(expected))


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
