"""Several proposers in a row: the first one that has something to say proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..contracts import Noise, Proposal, Proposer, Scores, no_proposal
from ..kept import Kept, Memory
from .row_by_row import side_by_side

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

    def recall(self, lengths: Sequence[int], kept: Sequence[Mapping[str, Kept]]) -> None:
        """All recall."""
        for proposer in self._proposers.values():
            proposer.recall(lengths, kept)

    def memories(self, sequence: int) -> Mapping[str, Memory]:
        """Those of all."""
        told: dict[str, Memory] = {}
        for proposer in self._proposers.values():
            told |= proposer.memories(sequence)
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
