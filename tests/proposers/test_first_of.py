"""Several proposers in a row: which one drafts, what it may draft, and who observes."""

import mlx.core as mx

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.proposer import GroupProposer
from mlx_specdec.proposers.adapters import FirstOf
from mlx_specdec.types import Proposal, Scores

from ..support.rows import row_of

NOISE = SilentNoise()
ROWS = [row_of([1], 23) for _ in range(3)]


class Scripted(GroupProposer):
    """A proposer of these tokens, which notes its limits."""

    def __init__(self, *tokens: list[int]) -> None:
        self.tokens = tokens
        self.calls: list[list[int]] = []
        self.seen = 0

    def ready(self, rows, limits) -> bool:
        return any(self.tokens)

    def propose(self, rows, limits, noise) -> Proposal:
        self.calls.append(limits)
        cut = [row[:limit] for row, limit in zip(self.tokens, limits, strict=True)]
        return Proposal.one_hot(cut)

    def observe(self, rows, scores) -> None:
        self.seen += 1


def several(parts: dict[str, GroupProposer], most: dict[str, int] | None = None) -> FirstOf:
    return FirstOf(parts, lambda name, asked, rows: min(asked, (most or {}).get(name, asked)))


def test_the_first_that_does_not_abstain_proposes_and_is_named() -> None:
    silent, talker, last = Scripted([]), Scripted([4, 5, 6]), Scripted([9])
    made = several({"a": silent, "b": talker, "c": last})
    proposal = made.propose(ROWS[:1], [2], NOISE)
    assert (proposal.source, proposal.tokens.tolist()) == ("b", [[4, 5]])
    assert (silent.calls, talker.calls, last.calls) == ([[2]], [[2]], [])
    made.observe(ROWS[:1], Scores(mx.zeros((1, 3, 7))))
    assert [one.seen for one in (silent, talker, last)] == [1, 1, 1]


def test_a_proposer_without_a_limit_is_not_asked() -> None:
    free, paid = Scripted([4, 5, 6], [7]), Scripted([8, 8, 8], [9, 9])
    made = several({"a": free, "b": paid}, {"a": 0, "b": 2})
    assert made.propose(ROWS[:2], [3, 1], NOISE).tokens.tolist() == [[8, 8], [9, 0]]
    assert (free.calls, paid.calls) == ([], [[2, 1]])
    silent = several({"a": free, "b": Scripted([], [])}, {"a": 0})
    assert made.ready(ROWS[:2], [3, 1]) and not silent.ready(ROWS[:2], [3, 1])


def test_in_a_batch_the_next_one_proposes_where_the_first_has_nothing() -> None:
    silent, every = Scripted([], [], []), Scripted([9], [9], [9])
    first, second = Scripted([4], [], []), Scripted([5, 6], [7, 8], [])
    proposal = several({"a": first, "b": second, "c": every}).propose(ROWS, [4] * 3, NOISE)
    assert [proposal.of(row).tokens.tolist() for row in range(3)] == [[[4]], [[7, 8]], [[9]]]
    assert [proposal.source_of(row) for row in range(3)] == ["a", "b", "c"]
    assert proposal.source == "c"
    assert several({"a": first, "b": silent}).propose(ROWS, [4] * 3, NOISE).counts == (1, 0, 0)
    assert several({"c": every, "b": silent}).propose(ROWS, [4] * 3, NOISE).counts == (1, 1, 1)
    assert len(silent.calls) == 1, "if every row has draft tokens, nobody else is asked"
