"""How many tokens to draft in the next round, zero included."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import OptionError
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
    only hearing of a round changes it."""

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen when; empty where it was fixed."""
        ...

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return at most remaining - 1 tokens, so that a bonus token never overruns.

        remaining: how many tokens may still be emitted, at least 1. rows: sequences of the batch.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same number in every round; 0 is plain decoding. Raises OptionError below 0."""

    count: int
    changes: Sequence[Change] = ()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    def choose(self, remaining: int, rows: int = 1) -> int:
        """`count`, or less where the text is about to end."""
        return max(0, min(self.count, remaining - 1))

    def on_round(self, report: RoundReport) -> None:
        """Nothing is learned."""
