"""What a request itself says of its text is proposed: what its grammar forces, and what the client
predicts. It costs microseconds.

Source of the idea of the first: fast-forward tokens of llguidance (docs/fast_forward.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..interfaces import Model
from ..sampling.constraint import Constraint
from .drafter import Drafter, LoadedPair, Setup
from .lookup import Continuation

FORCED = "forced"
PREDICTION = "prediction"
SHORTEST = 3
"""Tokens that find a place in the predicted text."""


def drafter(pair: LoadedPair) -> Drafter:
    """Return what every pair has; it abstains in texts without a constraint."""

    def make(setup: Setup) -> Forced:
        return Forced(pair.target, lambda: pair.constraint(setup.options.constraint))

    return Drafter(FORCED, make)


def predicting(predicted: Sequence[int]) -> Drafter:
    """Return the drafter of one request. predicted: token ids; with none it abstains."""
    return Drafter(PREDICTION, lambda setup: Prediction(predicted))


class Forced(Continuation):
    """Proposes the tokens that a grammar leaves no choice about: keys, brackets, quotes.

    target: tells where a text begins. make: makes a constraint of a text that has not begun, None
    without a grammar.
    """

    def __init__(self, target: Model, make: Callable[[], Constraint | None]) -> None:
        self._target = target
        self._make = make
        self._constraint: Constraint | None = None
        self._read = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Proposer."""
        [prompt] = prompts
        self._constraint = self._make()
        self._read = len(self._target.prefix(prompt))

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        """See Continuation."""
        if self._constraint is None:
            return []
        self._constraint.take(committed[self._read :])
        self._read = len(committed)
        return self._constraint.forced()[:limit]


class Prediction(Continuation):
    """Proposes what follows in the text that the client predicts."""

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = list(predicted)
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(SHORTEST, len(self._predicted) + 1):
            self._after[tuple(self._predicted[end - SHORTEST : end])].append(end)
        self.begin([[]])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Proposer."""
        [self._prompt] = map(list, prompts)
        self._read: int | None = None
        self._place: int | None = 0
        self._furthest = 0

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        """See Continuation."""
        if not self._predicted:
            return []
        if self._read is None:
            # The prompt of an encoder-decoder model is no part of its text.
            whole = list(committed[: len(self._prompt)]) == self._prompt
            self._read = len(self._prompt) if whole else 1
        for end in range(self._read + 1, len(committed) + 1):
            self._follow(committed, end)
        self._read = len(committed)
        return [] if self._place is None else self._predicted[self._place : self._place + limit]

    def _follow(self, committed: Sequence[int], end: int) -> None:
        """Find the place in the predicted text after `committed[end - 1]` was written."""
        place = self._place
        if place is not None and self._predicted[place : place + 1] == [committed[end - 1]]:
            self._place = place + 1
        else:
            places = self._after.get(tuple(committed[end - SHORTEST : end]), [])
            further = bisect_left(places, self._furthest)
            self._place = places[min(further, len(places) - 1)] if places else None
        self._furthest = max(self._furthest, self._place or 0)
