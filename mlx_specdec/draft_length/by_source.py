"""How many tokens each of several proposers may draft: one controller a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..interfaces.rounds import RoundReport
from .auto_length import AutoLength
from .choice import Choice
from .length import Change, DraftLength
from .rival import Rival


class LengthsBySource:
    """DraftLength for rounds whose source is known only when they are drafted.

    `choose` gives what the boldest would draft, `limit` what the one that is asked may. Verdicts
    and costs of a round go to its source, plain steps to all. Of rivals one at a time is asked: the
    one that promises most, each having been tried; the others are tried again where their budgets
    pay for it.
    """

    def __init__(self, lengths: Mapping[str, DraftLength]) -> None:
        self._lengths = dict(lengths)
        self._chosen = dict.fromkeys(self._lengths, 0)
        self._rivals = {n: one for n, one in lengths.items() if isinstance(one, Rival)}
        self._asked = max(self._rivals, key=lambda name: self._rivals[name].speed, default="")
        for name, rival in self._rivals.items():
            if name != self._asked:
                rival.stand_by(0.0)

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
        if self._rivals:
            self._asked = self._best_rival()
        # Nothing remains for those that are not asked.
        self._chosen = {
            name: length.choose(remaining if self._may(name) else 1, rows)
            for name, length in self._lengths.items()
        }
        return max(self._chosen.values())

    def limit(self, name: str, most: int) -> int:
        """How many tokens `choose` lets the named source draft, of at most `most`."""
        return min(most, self._chosen[name])

    def on_round(self, report: RoundReport) -> None:
        """A round with drafts is its source's, a plain step everybody's."""
        for name, length in self._lengths.items():
            if report.size == 0 or name == report.source:
                length.on_round(report)
            elif name in self._rivals:
                self._rivals[name].stand_by(report.times.total)

    def _may(self, name: str) -> bool:
        return name == self._asked or name not in self._rivals

    def _best_rival(self) -> str:
        current = self._rivals[self._asked]
        if current.begins:
            return self._asked
        for name, rival in self._rivals.items():
            if rival is not current and (rival.begins or rival.challenge(current)):
                return name
        best = max(self._rivals, key=lambda name: self._rivals[name].speed)
        promised = self._rivals[best].speed
        return best if promised > Choice.WORTH_CHANGING * current.speed else self._asked
