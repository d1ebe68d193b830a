"""The proposer of CONTRIBUTING.md."""

from collections.abc import Sequence

from mlx_specdec.core.proposer import GroupProposer
from mlx_specdec.core.row import Row
from mlx_specdec.types import Noise, Proposal


class Repeat(GroupProposer):
    """A proposer of what followed the newest token at its last occurrence."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        return Proposal.one_hot(list(map(self._continuation, rows, limits)))

    def _continuation(self, row: Row, limit: int) -> list[int]:
        tokens = row.committed
        for place in range(len(tokens) - 1, 0, -1):
            if tokens[place - 1] == tokens[-1]:
                return tokens[place : place + limit]
        return []
