"""The description of a proposer before it exists, and the settings that make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .proposer import Proposer

LONGEST_DRAFT = 16
"""The longest draft of a proposer with weights, in tokens, and the longest that is timed."""


@dataclass(frozen=True)
class Prices:
    """The measured costs of rounds, in plain decoding steps.

    Attributes:
        rounds: Entry n is the cost of a round with draft length n.
        rate: The tokens per plain step's time that the best alternative brings."""

    rounds: Sequence[float]
    rate: float

    def most(self, chances: Sequence[float]) -> int:
        """Return the draft length whose expected tokens exceed its cost by most; 0 if no draft
        length is worth it.

        Args:
            chances: See `worth.values`; of several rows, the mean over them."""
        tokens = accumulate(chances, initial=1.0)
        gains = [count - self.rate * cost for count, cost in zip(tokens, self.rounds, strict=False)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def least(self, count: int) -> list[float]:
        """Return for each of `count` draft tokens the least probability of acceptance at which its
        verification pays. Costs need not be linear: several tokens may cost as much as one."""
        costs = np.array(self.rounds[: count + 1])
        steps = range(1, count + 1)
        rises = [(costs[at:] - costs[at - 1]) / np.arange(1, count + 2 - at) for at in steps]
        return [self.rate * float(rise.min()) for rise in rises]


@dataclass(frozen=True)
class Setup:
    """How a proposer works together with others.

    Attributes:
        followed: Whether another proposer drafts if this one abstains.
        eager: Returns whether the proposer should prefill before its first draft.
        prices: Returns the measured costs of rounds of a number of rows; None if the proposer must
            not choose its own draft length."""

    followed: bool = False
    eager: Callable[[], bool] = lambda: True
    prices: Callable[[int], Prices | None] = lambda rows: None


@dataclass(frozen=True)
class Drafter:
    """A proposer that a pair supports, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        make: Makes the proposer.
        most: Largest draft length to consider, in tokens.
        nbytes: Size of the weights in bytes. A drafter without weights costs almost nothing.
        identity: Distinguishes drafters of the same name, such as draft models.
        stops: Whether the proposer shortens its proposals by `Setup.prices`.
        causes: Why its draft tokens may hardly ever be accepted, for a warning.
        costs: Name under which its costs are saved.
        text: Name under which its acceptance is saved."""

    name: str
    make: Callable[[Setup], Proposer]
    most: int = LONGEST_DRAFT
    nbytes: int = 0
    identity: str = ""
    stops: bool = False
    causes: str = (
        "was probably made for another target, or for the model that this one was fine-tuned from"
    )
    costs: str = "draft"
    text: str = "draft"

    @property
    def free(self) -> bool:
        """Whether the proposer has no weights."""
        return not self.nbytes
