"""How much of a draft is worth verifying, by what its drafter says of its tokens.

A draft ends before the first token that is not worth it. What is said of a token is said before it
is drawn, and nothing that is said of later ones is looked at: where a draft ends then tells nothing
of the tokens that are dropped, and every rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import mlx.core as mx

from ..contracts import Prices

LEAST = 0.1
"""A chance to stay below which tokens are so rare that looking for them, which waits for the draft,
costs more than they do."""
WEIGHT = 8.0
"""Tokens for which a drafter is believed before anything became of its drafts."""
MEMORY = 200.0
"""Tokens after which what became of earlier ones counts for a third."""


class Confidence:
    """Ends a drafter's drafts, and learns by how much it is too sure."""

    def __init__(self) -> None:
        self._expected = self._stayed = 0.0
        self._open = 0.0

    @property
    def scale(self) -> float:
        """How many tokens stay where one was expected to."""
        return (self._stayed + WEIGHT) / (self._expected + WEIGHT)

    def forget(self) -> None:
        """No draft waits for its verdict."""
        self._open = 0.0

    def learn(self, stayed: int) -> None:
        """What became of the last draft, in tokens, if one was looked at."""
        if self._open:
            kept = max(0.0, 1 - self._open / MEMORY)
            self._expected = self._expected * kept + self._open
            self._stayed = self._stayed * kept + stayed
        self._open = 0.0

    def worth(self, chances: mx.array, prices: Prices) -> int:
        """How many of the drafted tokens to verify, at least one.

        chances: (1, count), each token's if all before it stay; read where the costs say that it
        can matter.
        """
        count = chances.shape[1]
        wanted = least_chances(prices, count)
        if max(wanted[1:], default=0.0) < LEAST:
            return count
        told: list[float] = chances[0].tolist()  # type: ignore[assignment]
        staying = list(accumulate(told, mul))
        short = (at for at in range(1, count) if self.scale * staying[at] < wanted[at])
        kept = next(short, count)
        self._open = sum(staying[:kept])
        return kept


def least_chances(prices: Prices, count: int) -> Sequence[float]:
    """How likely each of `count` tokens must be to stay to be worth its verification. Costs need
    not rise in a line: a token may be the first of several that are had for the price of one."""
    costs = prices.rounds[: count + 1]
    rises = (
        min((costs[end] - costs[at]) / (end - at) for end in range(at + 1, count + 1))
        for at in range(count)
    )
    return [rise / prices.token for rise in rises]
