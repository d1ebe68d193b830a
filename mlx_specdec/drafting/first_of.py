"""Several proposers in a row: the first one that has something to say proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..contracts import Noise, Proposal, Proposer, Scores, no_proposal

Limit = Callable[[str, int], int]
"""How many tokens the named proposer may draft now, of at most so many."""


class FirstOf(Proposer):
    """Proposer that asks others in their order; cheap ones that abstain belong before dear ones.

    proposers: by name, which the proposal carries as its source. limit: for each of them.
    """

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        self._proposers = dict(proposers)
        self._limit = limit
        self.taps = tuple(dict.fromkeys(tap for one in proposers.values() for tap in one.taps))

    def begin(self, prompt: Sequence[int]) -> None:
        """All begin."""
        for proposer in self._proposers.values():
            proposer.begin(prompt)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any of them would draft."""
        limits = ((each, self._limit(name, limit)) for name, each in self._proposers.items())
        return any(count > 0 and each.ready(committed, count) for each, count in limits)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What the first one proposes that does not abstain; nothing if all do."""
        for name, proposer in self._proposers.items():
            count = self._limit(name, limit)
            if count:
                proposal = proposer.propose(committed, count, noise)
                if proposal.size:
                    return replace(proposal, source=name)
        return no_proposal(len(committed))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """All look back, whoever proposed."""
        for proposer in self._proposers.values():
            proposer.observe(tokens, scores)
