"""Several proposers in a row: who proposes, who is told, and whose length counts."""

import mlx.core as mx

from mlx_specdec.interfaces import Prices, Proposal, Proposer, Scores
from mlx_specdec.proposers.combined import FirstOf, RowByRow
from mlx_specdec.sampling.noise import SilentNoise

NOISE = SilentNoise().at(0, 0)


def allowed(name: str, most: int, rows: int) -> int:
    """Whatever was asked for."""
    return most


class Scripted(Proposer):
    """Proposes what it was told to, and remembers what it was asked."""

    def __init__(self, tokens: list[int], taps: tuple[str, ...] = ()) -> None:
        self.taps = taps
        self.tokens = tokens
        self.calls: list[int] = []
        self.begun = self.seen = 0

    def begin(self, prompts) -> None:
        self.begun += 1

    def ready(self, committed, limit) -> bool:
        return bool(self.tokens)

    def propose(self, committed, limit, noise) -> Proposal:
        self.calls.append(limit)
        return Proposal.one_hot([self.tokens[:limit]])

    def observe(self, tokens, scores) -> None:
        self.seen += 1


def test_the_first_that_does_not_abstain_proposes_and_is_named() -> None:
    silent, talker, last = Scripted([]), Scripted([4, 5, 6]), Scripted([9])
    several = FirstOf({"a": silent, "b": talker, "c": last}, allowed)
    several.begin([[1]])
    proposal = several.propose([[1, 2]], 2, NOISE)
    assert (proposal.source, proposal.tokens.tolist()) == ("b", [[4, 5]])
    assert (silent.calls, talker.calls, last.calls) == ([2], [2], [])
    several.observe([[2, 4, 5]], [Scores(mx.zeros((1, 3, 7)))])
    assert [one.begun for one in (silent, talker, last)] == [1, 1, 1]
    assert [one.seen for one in (silent, talker, last)] == [1, 1, 1]


class InBatches(Proposer):
    """Proposes these tokens for the sequences of a batch."""

    batches = True

    def __init__(self, *tokens: list[int]) -> None:
        self.tokens = tokens
        self.calls = 0

    def propose(self, committed, limit, noise) -> Proposal:
        self.calls += 1
        return Proposal.one_hot(self.tokens)


def test_in_a_batch_the_next_one_proposes_where_the_first_has_nothing() -> None:
    parts = {
        "a": InBatches([4], [], []),
        "b": InBatches([5, 6], [7, 8], []),
        "c": InBatches([9], [9], [9]),
    }
    several = FirstOf(parts, allowed)
    proposal = several.propose([[1], [2], [3]], 4, NOISE)
    assert [proposal.of(row).tokens.tolist() for row in range(3)] == [[[4]], [[7, 8]], [[9]]]
    assert [proposal.source_of(row) for row in range(3)] == ["a", "b", "c"]
    assert proposal.source == "c"
    silent = InBatches([], [], [])
    several = FirstOf({"a": parts["a"], "b": silent}, allowed)
    assert several.propose([[1], [2], [3]], 4, NOISE).counts == (1, 0, 0)
    several = FirstOf({"c": parts["c"], "b": silent}, allowed)
    assert several.propose([[1], [2], [3]], 4, NOISE).counts == (1, 1, 1)
    assert silent.calls == 1, "where every sequence has something, nobody else is asked"


def test_rows_of_a_batch_draft_what_is_worth_it_for_all_of_them() -> None:
    def made(chances: list[list[float]], token: float) -> tuple[Proposal, bool]:
        parts = [Scripted(list(range(len(row)))) for row in chances]
        for part, row in zip(parts, chances, strict=True):
            part.chances = row
        makes = iter(parts)
        rounds = [1.0, 1.3, 1.8, 2.4]
        rows = RowByRow(lambda: next(makes), lambda count: Prices(rounds, token))
        committed = [[1]] * len(chances)
        return rows.propose(committed, 3, NOISE), rows.ready(committed, 3)

    sure = [0.9, 0.8, 0.7]
    # One row in four gains 0.9 tokens, which 0.3 plain steps for all four do not pay.
    assert made([sure, [], [], []], 1.0)[0].size == 0
    assert not made([sure, [], [], []], 1.0)[1]
    proposal, ready = made([sure, sure, sure, [0.9]], 1.0)
    assert ready and proposal.counts == (2, 2, 2, 1)
    # Where a token costs less otherwise, only the first one is worth what it costs.
    assert made([sure, sure, [0.9], [0.9]], 0.8)[0].counts == (1, 1, 1, 1)
    assert made([sure, [], [], []], 3.0)[0].counts == (2, 0, 0, 0)
