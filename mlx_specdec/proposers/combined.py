"""The proposer that asks several in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..core.proposer import Proposer, side_by_side
from ..core.row import Row
from ..types import Cached, Noise, Proposal, Reusable, Scores, no_proposal

Limit = Callable[[str, int, int], int]
"""Returns how many tokens a proposer may draft now. Arguments: the proposer's name, the draft
length, and the number of rows."""


class FirstOf(Proposer):
    """A proposer that uses the first of several that does not abstain, so cheap proposers belong
    before expensive ones. A proposal names its proposer."""

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        self._proposers = proposers
        self._limit = limit
        parts = proposers.values()
        self.hidden = tuple(dict.fromkeys(name for part in parts for name in part.hidden))
        self.needs = tuple(dict.fromkeys(name for part in parts for name in part.needs))

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        return any(part.ready(rows, limited) for _, part, limited in self._allowed(limits))

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See Proposer. Each proposer drafts for the rows for which all before it have
        abstained."""
        made, places = no_proposal(len(rows)), range(len(rows))
        for name, part, limited in self._allowed(limits):
            if (proposal := part.propose(rows, limited, noise)).size:
                proposal = replace(proposal, source=name)
                if made.size:
                    best = [(made if made.count(row) else proposal).of(row) for row in places]
                    proposal = replace(side_by_side(best), source=name)
                made = proposal
                if all(map(made.count, places)):
                    break
        return made

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """See Proposer. All proposers observe, whichever of them drafted."""
        for part in self._proposers.values():
            part.observe(rows, scores)

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        states = (part.snapshot(row) for part in self._proposers.values())
        return {name: state for each in states for name, state in each.items()}

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        for part in self._proposers.values():
            part.restore(row, parts)

    def _allowed(self, limits: Sequence[int]) -> Iterator[tuple[str, Proposer, list[int]]]:
        """Yield the name, the proposer and the limits of each proposer that may draft now."""
        for name, part in self._proposers.items():
            most = self._limit(name, max(limits), len(limits))
            if (limited := [min(limit, most) for limit in limits]) and max(limited) > 0:
                yield name, part, limited
