"""How many tokens to draft in the next round, zero included."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import OptionError
from ..interfaces import Prices
from ..interfaces.results import RoundListener, RoundReport


@dataclass(frozen=True)
class Change:
    """From round `round` on, counted from 0, `length` tokens were drafted, because they promised
    `speed` times plain decoding. source: by whom, where several may."""

    round: int
    length: int
    speed: float
    source: str = ""


class DraftLength(RoundListener, Protocol):
    """Chooses the number of drafted tokens; 0 means a plain decoding step. It reads no clock, and
    only hearing of a round changes it. A class that inherits from this Protocol only has to define
    `choose` and `on_round`."""

    learns: bool = False
    """Whether rounds teach it their costs, so that it has `prices`, and `knowledge` to save."""

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen when; empty if the length is fixed."""
        return ()

    @property
    def knowledge(self) -> Mapping[str, np.ndarray]:
        """What later texts may begin with; see saved.Knowledge."""
        return {}

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return at most remaining - 1 tokens, so that a bonus token never overruns.

        remaining: how many tokens may still be emitted, at least 1. rows: sequences of the batch.
        """
        ...

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named drafter may draft, of at most `most`."""
        return most

    def eager(self, name: str) -> bool:
        """Return whether the named drafter should read a prompt before the first token."""
        return self.choose(sys.maxsize) > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        """Return the costs of rounds of the named drafter, or None if they are not known."""
        return None

    def begin(self, context: int, prompt: int, remaining: int, *, late: bool = False) -> None:
        """Plan for a text that is decoded alone.

        context: committed tokens. prompt: tokens that a drafter has to read. remaining: tokens that
        may follow. late: drafters read the prompt after the first token."""
        return None

    def meanwhile(self) -> None:
        """Do work that nothing waits for, while a pass is in flight."""
        return None

    def learn(self) -> None:
        """Learn from all rounds so far."""
        return None


@dataclass(frozen=True)
class FixedLength(DraftLength):
    """The same number in every round; 0 is plain decoding. Raises OptionError below 0."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    def choose(self, remaining: int, rows: int = 1) -> int:
        """`count`, or less where the text is about to end."""
        return max(0, min(self.count, remaining - 1))

    def on_round(self, report: RoundReport) -> None:
        """Nothing is learned."""
