"""Forced tokens: what is proposed, when, and from where a text begins."""

import mlx.core as mx
import pytest

from mlx_specdec.interfaces import Proposal
from mlx_specdec.proposers.combined import RowByRow
from mlx_specdec.proposers.lookup import Forced
from mlx_specdec.sampling.constraint import Constraint
from mlx_specdec.sampling.noise import SilentNoise

from ..support.letters import alphabet, regex

PIECES = ("<end>", "a", "b", "ab", "c")


class Target:
    """Its texts begin with the prompt, or with a start token."""

    def __init__(self, start: list[int] | None = None) -> None:
        self.start = start

    def prefix(self, prompt: list[int]) -> list[int]:
        return list(prompt) if self.start is None else self.start


def bound(pattern: str | None) -> Constraint | None:
    return None if pattern is None else alphabet(PIECES).constraint(regex(pattern), [0])


def forced(pattern: str | None, target: Target | None = None) -> Forced:
    return Forced(target or Target(), lambda: bound(pattern))


def proposed(proposer: Forced, committed: list[int], limit: int = 8) -> list[int]:
    proposal: Proposal = proposer.propose([committed], limit, SilentNoise())
    assert proposal.rows is None
    assert proposer.ready([committed], limit) == (proposal.size > 0)
    return proposal.tokens.tolist()[0]


@pytest.mark.parametrize("start", [None, [0]])
def test_what_must_come_is_proposed_behind_what_has_come(start: list[int] | None) -> None:
    proposer, prompt = forced("(a|b)cabcab", Target(start)), [2, 2, 2]
    proposer.begin([prompt])
    before = start or prompt
    assert proposed(proposer, before) == []
    assert proposed(proposer, [*before, 1]) == [4, 3, 4, 3]
    assert proposed(proposer, [*before, 1], limit=3) == [4, 3, 4]
    assert proposed(proposer, [*before, 1, 4, 3, 4]) == [3]
    assert proposed(proposer, [*before, 1, 4, 3, 4, 3]) == []
    assert proposed(proposer, [*before, 1, 4, 3, 4, 3, 0]) == []


def test_in_a_batch_each_sequence_has_its_own() -> None:
    rows = RowByRow(lambda: forced("(a|b)cab"))
    rows.begin([[1], [2]])
    proposal = rows.propose([[1, 1], [2]], 4, SilentNoise())
    assert proposal.counts == (2, 0)
    assert mx.array_equal(proposal.tokens[0], mx.array([4, 3]))
    rows.filter([1])
    assert rows.propose([[2, 2, 4]], 4, SilentNoise()).tokens.tolist() == [[3]]
