"""Several proposers in a row: the first one that has something to say proposes.

Knows proposers by name and how many tokens each may draft now. Knows nothing of how they guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..contracts import Noise, Proposal, Proposer, Round, Scores

Limit = Callable[[str, int], int]
"""How many tokens the named proposer may draft now, of at most so many."""


class FirstOf:
    """Proposer that asks others in their order; cheap ones that abstain belong before dear ones.

    proposers: by name, which the proposal carries as its source. limit: for each of them.
    """

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        self._proposers = dict(proposers)
        self._limit = limit
        self.taps = tuple(dict.fromkeys(tap for one in proposers.values() for tap in one.taps))

    def begin(self, prompt: Sequence[int], scores: Scores | None) -> None:
        """All begin."""
        for proposer in self._proposers.values():
            proposer.begin(prompt, scores)

    def propose(self, committed: Sequence[int], limit: int, noise: Noise) -> Proposal:
        """What the first one proposes that does not abstain; nothing if all do."""
        for name, proposer in self._proposers.items():
            count = self._limit(name, limit)
            if count:
                proposal = proposer.propose(committed, count, noise)
                if proposal.size:
                    return replace(proposal, source=name)
        return Proposal(mx.zeros((1, 0), dtype=mx.int32))

    def observe(self, round: Round) -> None:
        """All look back, whoever proposed."""
        for proposer in self._proposers.values():
            proposer.observe(round)
