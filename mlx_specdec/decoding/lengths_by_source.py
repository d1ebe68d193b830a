"""How many tokens each of several proposers may draft: one controller a source.

Knows names. Knows nothing of who drafts how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .draft_length import AutoLength, Change, DraftLength


class LengthsBySource:
    """DraftLength for rounds whose source is known only when they are drafted.

    `choose` gives what the boldest would draft, `limit` what the one that is asked may. Verdicts
    and costs of a round go to its source, plain steps to all.
    """

    def __init__(self, lengths: Mapping[str, DraftLength]) -> None:
        self._lengths = dict(lengths)

    @property
    def changes(self) -> Sequence[Change]:
        """What was chosen for whom and when."""
        found = [
            replace(change, source=name)
            for name, length in self._lengths.items()
            if isinstance(length, AutoLength)
            for change in length.changes
        ]
        return tuple(sorted(found, key=lambda change: change.round))

    def measured(self) -> dict[str, dict[int, float]]:
        """Costs of rounds by source, where this text had enough of them."""
        autos = ((n, one) for n, one in self._lengths.items() if isinstance(one, AutoLength))
        return {name: length.measured() for name, length in autos}

    def choose(self, room: int) -> int:
        """The longest draft that any source may make."""
        return max(length.choose(room) for length in self._lengths.values())

    def limit(self, name: str, most: int) -> int:
        """How many tokens the named source may draft, of at most `most`."""
        return self._lengths[name].choose(most + 1)

    def observe(
        self,
        drafted: int,
        accepted: int,
        seconds: float,
        draft: float | None = None,
        source: str = "",
    ) -> None:
        """What the last round was; drafted 0 is a plain step, and everybody's."""
        if drafted:
            self._lengths[source].observe(drafted, accepted, seconds, draft)
            return
        for length in self._lengths.values():
            length.observe(0, 0, seconds)
