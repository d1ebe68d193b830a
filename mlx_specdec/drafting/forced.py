"""What a grammar leaves no choice about is proposed: keys, brackets, quotes.

It costs microseconds, and where the grammar writes them in one way only, no token is rejected.
Source of the idea: fast-forward tokens of llguidance (docs/fast_forward.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..contracts import Model, Noise, Proposal, Proposer
from ..sampling.constraint import Constraint
from .drafter import Asked, Brought, Drafter

NAME = "forced"


def drafter(pair: Brought) -> Drafter:
    """Of every pair; it abstains in texts without a constraint."""

    def make(asked: Asked, first: bool) -> Forced:
        return Forced(pair.target, lambda: pair.constraint(asked.constraint))

    return Drafter(NAME, make)


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
