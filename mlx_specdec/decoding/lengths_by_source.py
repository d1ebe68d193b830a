"""How many tokens each of several proposers may draft: one controller a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .draft_length import AutoLength, Change, DraftLength
from .rounds import RoundReport


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
        changes = [
            replace(change, source=name)
            for name, length in self._lengths.items()
            if isinstance(length, AutoLength)
            for change in length.changes
        ]
        return tuple(sorted(changes, key=lambda change: change.round))

    @property
    def wants_parts(self) -> bool:
        """What any of them wants."""
        return any(length.wants_parts for length in self._lengths.values())

    @property
    def learning(self) -> dict[str, AutoLength]:
        """The controllers that learn, by source."""
        return {n: one for n, one in self._lengths.items() if isinstance(one, AutoLength)}

    def choose(self, remaining: int, rows: int = 1) -> int:
        """The longest draft that any source may make."""
        return max(length.choose(remaining, rows) for length in self._lengths.values())

    def limit(self, name: str, most: int) -> int:
        """How many tokens the named source may draft, of at most `most`."""
        return self._lengths[name].choose(most + 1)

    def on_round(self, report: RoundReport) -> None:
        """A round with drafts is its source's, a plain step everybody's."""
        if report.size:
            own = tuple(each for each in report.sequences if each.source == report.source)
            self._lengths[report.source].on_round(replace(report, sequences=own))
        else:
            for length in self._lengths.values():
                length.on_round(report)
