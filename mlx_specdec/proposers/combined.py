"""Several proposers in a row: the first one that has something to say proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..interfaces import Noise, Proposal, Proposer, Scores, no_proposal
from ..interfaces.reusable import Cached, Reusable

Limit = Callable[[str, int], int]
"""How many tokens the named proposer may draft now, of at most so many."""


class FirstOf(Proposer):
    """Proposer that asks others in their order; cheap ones that abstain belong before dear ones.

    proposers: by name, which the proposal carries as its source. limit: for each of them.
    """

    batches = True

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        self._proposers = dict(proposers)
        self._limit = limit
        self.taps = tuple(dict.fromkeys(tap for one in proposers.values() for tap in one.taps))
        self.needs = tuple(name for one in proposers.values() for name in one.needs)

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """All recall."""
        for proposer in self._proposers.values():
            proposer.recall(lengths, cached)

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """Those of all."""
        told: dict[str, Reusable] = {}
        for proposer in self._proposers.values():
            told |= proposer.reusable(sequence)
        return told

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """All begin."""
        for proposer in self._proposers.values():
            proposer.begin(prompts)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any of them would draft."""
        limits = ((each, self._limit(name, limit)) for name, each in self._proposers.items())
        return any(count > 0 and each.ready(committed, count) for each, count in limits)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What the first one proposes that does not abstain; nothing if all do. In a batch the next
        one is asked for the sequences that have nothing yet."""
        made = no_proposal(len(committed))
        for name, proposer in self._proposers.items():
            count = self._limit(name, limit)
            if count:
                proposal = replace(proposer.propose(committed, count, noise), source=name)
                made = _filled_up(made, proposal) if made.size else proposal
                if made.size and all(made.count(row) for row in range(len(committed))):
                    break
        return made if made.size else no_proposal(len(committed))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """All look back, whoever proposed."""
        for proposer in self._proposers.values():
            proposer.observe(tokens, scores)

    def join(self, other: FirstOf) -> None:
        """As contracts.Proposer says."""
        for name, proposer in self._proposers.items():
            proposer.join(other._proposers[name])

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        for proposer in self._proposers.values():
            proposer.filter(keep)


def _filled_up(first: Proposal, second: Proposal) -> Proposal:
    """The first proposal, and the second for the sequences that have nothing in the first."""
    if not second.size:
        return first
    batch = range(first.tokens.shape[0])
    each = [(first if first.count(row) else second).of(row) for row in batch]
    return replace(side_by_side(each), source=second.source)


class RowByRow(Proposer):
    """Proposer of a batch. make: makes one for a sequence."""

    batches = True

    def __init__(self, make: Callable[[], Proposer]) -> None:
        self._make = make
        self._rows = [make()]
        self.taps, self.needs = self._rows[0].taps, self._rows[0].needs

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """Each recalls what is its own."""
        self._make_rows(len(lengths))
        for row, length, its in zip(self._rows, lengths, cached, strict=True):
            row.recall([length], [its])

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """Those of the sequence's own."""
        return self._rows[sequence].reusable(0)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each begins with its own prompt."""
        self._make_rows(len(prompts))
        for row, prompt in zip(self._rows, prompts, strict=True):
            row.begin([prompt])

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any of them would draft."""
        return any(
            row.ready([text], limit) for row, text in zip(self._rows, committed, strict=True)
        )

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What each one proposes; sequences whose proposer abstains have none."""
        return side_by_side(
            [
                row.propose([text], limit, noise.of(number))
                for number, (row, text) in enumerate(zip(self._rows, committed, strict=True))
            ]
        )

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Each sees its own sequence."""
        for row, kept, its in zip(self._rows, tokens, scores, strict=True):
            row.observe([kept], [its])

    def join(self, other: RowByRow) -> None:
        """As contracts.Proposer says."""
        self._rows += other._rows

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        self._rows = [self._rows[row] for row in keep]

    def _make_rows(self, count: int) -> None:
        self._rows += [self._make() for _ in range(count - len(self._rows))]


def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
    """One rectangle from proposals for one sequence each; shorter ones are filled up."""
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


class Limited(Proposer):
    """Proposer that passes on what another one proposes.

    limits: the most tokens in a round, one entry per sequence; of a row with 0 nothing is verified
    but what fills up the rectangle.
    """

    batches = True

    def __init__(self, proposer: Proposer, limits: Sequence[int]) -> None:
        self._proposer = proposer
        self._limits = list(limits)
        self.taps = proposer.taps
        self.needs = proposer.needs

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """As contracts.Proposer says."""
        self._proposer.recall(lengths, cached)

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """As contracts.Proposer says."""
        return self._proposer.reusable(sequence)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """As contracts.Proposer says."""
        self._proposer.begin(prompts)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any sequence allows drafts, and the other one would draft."""
        most = min(limit, max(self._limits))
        return most > 0 and self._proposer.ready(committed, most)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What the other one proposes, cut to the limits."""
        most = min(limit, max(self._limits))
        if most == 0:
            return no_proposal(len(committed))
        made = self._proposer.propose(committed, most, noise)
        counts = tuple(min(made.count(row), own) for row, own in enumerate(self._limits))
        if all(made.count(row) == count for row, count in enumerate(counts)):
            return made
        cut = replace(made, counts=counts)
        each = [cut.of(row) for row in range(len(counts))]
        return replace(side_by_side(each), source=made.source)

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """As contracts.Proposer says."""
        self._proposer.observe(tokens, scores)

    def join(self, other: Limited) -> None:
        """As contracts.Proposer says."""
        self._proposer.join(other._proposer)
        self._limits += other._limits

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        self._proposer.filter(keep)
        self._limits = [self._limits[row] for row in keep]
