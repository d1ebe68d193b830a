"""How many tokens to draft in the next round, zero included.

Knows counts and room. Knows nothing of who drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import OptionError


class DraftLength(Protocol):
    """Chooses the number of drafted tokens; 0 means a plain decoding step."""

    def choose(self, room: int) -> int:
        """At most room - 1 tokens, so that a bonus token never overruns.

        room: how many tokens may still be emitted, at least 1.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same number in every round; 0 is plain decoding.

    Raises OptionError for a negative number.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    def choose(self, room: int) -> int:
        """`count`, or less where the text is about to end."""
        return max(0, min(self.count, room - 1))
