"""Forced tokens: what is proposed, and from where a text begins."""

from typing import Any

from mlx_specdec.core.distribution import Distribution
from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.proposers.lookup import Forced

from ..support.letters import alphabet, regex
from ..support.rows import row_of

PIECES = ("<end>", "a", "b", "ab", "c")
LAW = regex("(a|b)cabcab")
FORCED = Forced()


def row(before: list[int]) -> Any:
    """A row with a grammar before its first token."""
    constraint = alphabet(PIECES).constraint(LAW, [0])
    law = Distribution(Options(), len(PIECES), constraint=constraint)
    return row_of(before, len(PIECES), distribution=law)


def proposed(rows: list[Any], written: list[list[int]], limit: int = 8) -> list[list[int]]:
    """Return the draft tokens of rows that have written these tokens."""
    for one, tokens in zip(rows, written, strict=True):
        if one.distribution.constraint is not None:
            one.distribution.constraint.take(tokens[one.position :])
        one.position = len(tokens)
    proposal = FORCED.propose(rows, [limit] * len(rows), SilentNoise())
    assert proposal.rows is None
    assert FORCED.ready(rows, [limit] * len(rows)) == (proposal.size > 0)
    return [proposal.of(place).tokens.tolist()[0] for place in range(len(rows))]


def test_what_must_come_is_proposed_behind_what_has_come() -> None:
    rows = [row([2, 2, 2])]
    assert proposed(rows, [[]]) == [[]]
    assert proposed(rows, [[1]]) == [[4, 3, 4, 3]]
    assert proposed(rows, [[1]], limit=3) == [[4, 3, 4]]
    assert proposed(rows, [[1, 4, 3, 4]]) == [[3]]
    assert proposed(rows, [[1, 4, 3, 4, 3]]) == [[]]
    assert proposed(rows, [[1, 4, 3, 4, 3, 0]]) == [[]]


def test_in_a_batch_each_row_has_its_own_place() -> None:
    rows = [row([1]), row([2]), row_of([1, 1], len(PIECES))]
    assert proposed(rows, [[1], [], [1]], 4) == [[4, 3, 4, 3], [], []]
    assert proposed(rows[1:], [[2, 4], [1]], 4) == [[3, 4, 3], []]
