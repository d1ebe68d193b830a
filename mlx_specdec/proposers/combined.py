"""Proposers that are made of others: several in turn, one for each sequence, one with limits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Self

import mlx.core as mx

from ..interfaces import Noise, Prices, Proposal, Proposer, Scores, no_proposal
from ..interfaces.results import Cached, Reusable

Limit = Callable[[str, int, int], int]
"""How many tokens a proposer may draft now, by its name, the most that are wanted, and the rows of
the batch."""


class Delegating(Proposer):
    """A proposer that passes everything on to its parts. A subclass adds `propose`."""

    batches = True

    def __init__(self, parts: Iterable[Proposer]) -> None:
        self._parts = list(parts)
        self.taps = tuple(dict.fromkeys(tap for part in self._parts for tap in part.taps))
        self.needs = tuple(dict.fromkeys(name for part in self._parts for name in part.needs))

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        for part, its in self._given(lengths, cached):
            part.recall(*its)

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        return {
            name: each for part in self._parts for name, each in part.reusable(sequence).items()
        }

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for part, its in self._given(prompts):
            part.begin(*its)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return any(part.ready(its[0], limit) for part, its in self._given(committed))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """See Proposer; all parts observe, whichever proposed."""
        for part, its in self._given(tokens, scores):
            part.observe(*its)

    def join(self, other: Self) -> None:
        for part, its in zip(self._parts, other._parts, strict=True):
            part.join(its)

    def filter(self, keep: Sequence[int]) -> None:
        for part in self._parts:
            part.filter(keep)

    def _given(self, *lists: Sequence[Any]) -> Iterable[tuple[Proposer, Sequence[Any]]]:
        """Yield each part with what it gets of lists that have one entry per sequence."""
        return ((part, lists) for part in self._parts)


class FirstOf(Delegating):
    """The first proposer that does not abstain proposes; cheap ones belong before dear ones.

    proposers: by name, which the proposal has as its source. limit: for each of them."""

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        super().__init__(proposers.values())
        self._names = tuple(proposers)
        self._limit = limit

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        rows = len(committed)
        limits = ((part, self._limit(name, limit, rows)) for name, part in self._named())
        return any(count > 0 and part.ready(committed, count) for part, count in limits)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Return the proposal of the first one that does not abstain. In a batch the next one
        proposes for the sequences that have nothing yet."""
        made, rows = no_proposal(len(committed)), range(len(committed))
        for name, part in self._named():
            count = self._limit(name, limit, len(committed))
            if count:
                proposal = replace(part.propose(committed, count, noise), source=name)
                if made.size and proposal.size:
                    each = [(made if made.count(row) else proposal).of(row) for row in rows]
                    made = replace(side_by_side(each), source=name)
                elif proposal.size:
                    made = proposal
                if made.size and all(map(made.count, rows)):
                    break
        return made

    def _named(self) -> Iterable[tuple[str, Proposer]]:
        return zip(self._names, self._parts, strict=True)


class RowByRow(Delegating):
    """A proposer of a batch, with a proposer of one sequence for each. make: makes one. prices: of
    rounds of so many rows; where the parts know their chances, they draft as far as that is worth
    it for all rows together."""

    def __init__(
        self,
        make: Callable[[], Proposer],
        prices: Callable[[int], Prices | None] = lambda rows: None,
    ) -> None:
        super().__init__([make()])
        self._make, self._prices = make, prices

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return self._most(committed, limit) > 0

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        return self._parts[sequence].reusable(0)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        if not (most := self._most(committed, limit)):
            return no_proposal(len(committed))
        rows = enumerate(self._given(committed))
        made = [part.propose(its[0], limit, noise.of(row)) for row, (part, its) in rows]
        return side_by_side([first(each, most) for each in made])

    def _most(self, committed: Sequence[Sequence[int]], limit: int) -> int:
        """Return how many tokens a row should draft at most."""
        ready = [part for part, its in self._given(committed) if part.ready(its[0], limit)]
        prices = self._prices(len(committed)) if ready else None
        if prices is None or not all(part.chances for part in ready):
            return limit if ready else 0
        columns = zip_longest(*(part.chances for part in ready), fillvalue=0.0)
        return prices.worth([sum(column) / len(committed) for column in columns])

    def join(self, other: Self) -> None:
        self._parts += other._parts

    def filter(self, keep: Sequence[int]) -> None:
        self._parts = [self._parts[row] for row in keep]

    def _given(self, *lists: Sequence[Any]) -> Iterable[tuple[Proposer, Sequence[Any]]]:
        self._parts += [self._make() for _ in range(len(lists[0]) - len(self._parts))]
        rows = zip(self._parts, *lists, strict=True)
        return ((part, [[each] for each in its]) for part, *its in rows)


class Limited(Delegating):
    """A proposer whose proposals are cut to limits of its sequences, in tokens a round."""

    def __init__(self, proposer: Proposer, limits: Sequence[int]) -> None:
        super().__init__([proposer])
        self._limits = list(limits)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        most = min(limit, max(self._limits))
        return most > 0 and super().ready(committed, most)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        most = min(limit, max(self._limits))
        if most == 0:
            return no_proposal(len(committed))
        made = self._parts[0].propose(committed, most, noise)
        counts = tuple(min(made.count(row), most) for row, most in enumerate(self._limits))
        if all(made.count(row) == count for row, count in enumerate(counts)):
            return made
        rows = side_by_side([first(made.of(row), count) for row, count in enumerate(counts)])
        return replace(rows, source=made.source)

    def join(self, other: Self) -> None:
        super().join(other)
        self._limits += other._limits

    def filter(self, keep: Sequence[int]) -> None:
        super().filter(keep)
        self._limits = [self._limits[row] for row in keep]


def first(proposal: Proposal, count: int) -> Proposal:
    """Return the first tokens of a proposal for one sequence."""
    if proposal.count(0) <= count:
        return proposal
    return replace(proposal, counts=(count,)).of(0)


def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
    """Return one rectangle of proposals for one sequence each; shorter ones are filled up."""
    size = max(each.size for each in proposals)
    if size == 0:
        return no_proposal(len(proposals))
    tokens = mx.concatenate(
        [mx.pad(each.tokens, [(0, 0), (0, size - each.size)]) for each in proposals]
    )
    sources = tuple(each.source for each in proposals)
    return Proposal(
        tokens,
        _rows(proposals, tokens),
        counts=tuple(each.count(0) for each in proposals),
        sources=sources if any(sources) else None,
    )


def _rows(proposals: Sequence[Proposal], tokens: mx.array) -> mx.array | None:
    drawn = next((each.rows for each in proposals if each.rows is not None), None)
    if drawn is None:
        return None
    certain = mx.where(tokens[..., None] == mx.arange(drawn.shape[-1]), 0.0, -mx.inf)
    return mx.concatenate(
        [
            certain[row : row + 1]
            if each.rows is None
            else mx.concatenate([each.rows, certain[row : row + 1, each.size :]], axis=1)
            for row, each in enumerate(proposals)
        ]
    )
