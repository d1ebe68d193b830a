"""The proposer of CONTRIBUTING.md: what followed the newest token is proposed again."""

from collections.abc import Sequence

from mlx_specdec.interfaces import Noise, Proposal, Proposer
from mlx_specdec.proposers.drafter import Drafter, LoadedPair


class Repeat(Proposer):
    """Proposes what followed the newest token where it occurred last."""

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """At most `limit` tokens a sequence; none where its newest token is new."""
        return Proposal.one_hot([self._continuation(tokens, limit) for tokens in committed])

    def _continuation(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        for place in range(len(tokens) - 1, 0, -1):
            if tokens[place - 1] == tokens[-1]:
                return tokens[place : place + limit]
        return ()


def drafter(pair: LoadedPair) -> Drafter:
    """Every pair has it: it needs no weights."""
    return Drafter("repeat", lambda setup: Repeat())
