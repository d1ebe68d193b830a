"""The protocol of everything that chooses the draft length, and the fixed draft length."""

import sys
from dataclasses import dataclass
from typing import Protocol

from ..errors import OptionError
from ..interfaces import Prices
from ..interfaces.results import RoundListener, RoundReport


class DraftLength(RoundListener, Protocol):
    """Chooses the number of draft tokens of each round; 0 means a plain decoding step.

    It reads no clock and learns from the reports of rounds. A class that inherits from this
    Protocol only has to define `choose` and `on_round`."""

    learns: bool = False
    """Whether it learns the costs of rounds, so that proposers may ask for `prices`."""

    @property
    def reason(self) -> str:
        """The reason for the draft length, in one line."""
        return ""

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the draft length of the next round, at most remaining - 1.

        Args:
            remaining: The number of tokens that may still be emitted, at least 1.
            rows: The number of sequences in the batch.
        """
        ...

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named proposer may draft, at most `most`."""
        return most

    def eager(self, name: str) -> bool:
        """Return whether the named proposer should prefill the prompt before its first draft."""
        return self.choose(sys.maxsize) > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        """Return the costs of rounds of the named proposer, None if it must not use them."""
        return None

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        """Prepare for a sequence that is decoded alone.

        Args:
            context: The number of committed tokens.
            prompt: The number of prompt tokens that a proposer has to prefill.
            remaining: The number of tokens that may be emitted.
        """
        return None

    def save(self) -> None:
        """Save the learned costs and acceptance rates for later completions."""
        return None


@dataclass(frozen=True)
class FixedLength(DraftLength):
    """A draft length that never changes. Raises OptionError if it is below 0."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    @property
    def reason(self) -> str:
        return f"the draft length is fixed at {self.count}"

    def choose(self, remaining: int, rows: int = 1) -> int:
        return max(0, min(self.count, remaining - 1))

    def on_round(self, report: RoundReport) -> None:
        """Learn nothing."""
