"""Forced tokens: what is proposed, and from where a text begins."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.proposers.lookup import Forced

from ..support.letters import alphabet, regex
from ..support.rows import row_of

PIECES = ("<end>", "a", "b", "ab", "c")
LAW = regex("(a|b)cabcab")
FORCED = Forced(lambda options: alphabet(PIECES).constraint(options.constraint, [0]))


def row(before: list[int], prompt: list[int] | None = None) -> Any:
    """A row with a grammar before its first token."""
    options: Any = SimpleNamespace(**vars(Options()) | {"constraint": LAW})
    made = row_of(before, len(PIECES))
    made.options, made.prompt = options, prompt or before
    return made


def proposed(rows: list[Any], written: list[list[int]], limit: int = 8) -> list[list[int]]:
    """Return the draft tokens of rows that have written these tokens."""
    for one, tokens in zip(rows, written, strict=True):
        one.committed = [*one.committed[: len(one.committed) - one.position], *tokens]
        one.position = len(tokens)
    proposal = FORCED.propose(rows, [limit] * len(rows), SilentNoise())
    assert proposal.rows is None
    assert FORCED.ready(rows, [limit] * len(rows)) == (proposal.size > 0)
    return [proposal.of(place).tokens.tolist()[0] for place in range(len(rows))]


@pytest.mark.parametrize("before", [[2, 2, 2], [0]])
def test_what_must_come_is_proposed_behind_what_has_come(before: list[int]) -> None:
    rows = [row(before, [2, 2, 2])]
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
