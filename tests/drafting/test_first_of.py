"""Several proposers in a row: who proposes, who is told, and whose length counts."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.by_source import LengthsBySource
from mlx_specdec.draft_length.learned import Learned
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.draft_length.rival import Rival
from mlx_specdec.interfaces import Proposal, Proposer, Scores
from mlx_specdec.proposers.combined import FirstOf
from mlx_specdec.sampling.noise import SilentNoise

from ..support.mocks import a_round

NOISE = SilentNoise().at(0, 0)


class Scripted(Proposer):
    """Proposes what it was told to, and remembers what it was asked."""

    def __init__(self, tokens: list[int], taps: tuple[str, ...] = ()) -> None:
        self.taps = taps
        self.tokens = tokens
        self.asked: list[int] = []
        self.begun = self.seen = 0

    def begin(self, prompts) -> None:
        self.begun += 1

    def ready(self, committed, limit) -> bool:
        return bool(self.tokens)

    def propose(self, committed, limit, noise) -> Proposal:
        self.asked.append(limit)
        return Proposal.one_hot([self.tokens[:limit]])

    def observe(self, tokens, scores) -> None:
        self.seen += 1


def test_the_first_that_does_not_abstain_proposes_and_is_named() -> None:
    silent, talker, last = Scripted([]), Scripted([4, 5, 6]), Scripted([9])
    several = FirstOf({"a": silent, "b": talker, "c": last}, lambda name, most: most)
    several.begin([[1]])
    proposal = several.propose([[1, 2]], 2, NOISE)
    assert (proposal.source, proposal.tokens.tolist()) == ("b", [[4, 5]])
    assert (silent.asked, talker.asked, last.asked) == ([2], [2], [])
    several.observe([[2, 4, 5]], [Scores(mx.zeros((1, 3, 7)))])
    assert [one.begun for one in (silent, talker, last)] == [1, 1, 1]
    assert [one.seen for one in (silent, talker, last)] == [1, 1, 1]


class InBatches(Proposer):
    """Proposes these tokens for the sequences of a batch."""

    batches = True

    def __init__(self, *tokens: list[int]) -> None:
        self.tokens = tokens
        self.asked = 0

    def propose(self, committed, limit, noise) -> Proposal:
        self.asked += 1
        return Proposal.one_hot(self.tokens)


def test_in_a_batch_the_next_one_proposes_where_the_first_has_nothing() -> None:
    parts = {
        "a": InBatches([4], [], []),
        "b": InBatches([5, 6], [7, 8], []),
        "c": InBatches([9], [9], [9]),
    }
    several = FirstOf(parts, lambda name, most: most)
    proposal = several.propose([[1], [2], [3]], 4, NOISE)
    assert [proposal.of(row).tokens.tolist() for row in range(3)] == [[[4]], [[7, 8]], [[9]]]
    assert [proposal.source_of(row) for row in range(3)] == ["a", "b", "c"]
    assert proposal.source == "c"
    silent = InBatches([], [], [])
    several = FirstOf({"a": parts["a"], "b": silent}, lambda name, most: most)
    assert several.propose([[1], [2], [3]], 4, NOISE).counts == (1, 0, 0)
    several = FirstOf({"c": parts["c"], "b": silent}, lambda name, most: most)
    assert several.propose([[1], [2], [3]], 4, NOISE).counts == (1, 1, 1)
    assert silent.asked == 1, "where every sequence has something, nobody else is asked"


def test_a_source_that_may_draft_nothing_is_not_asked() -> None:
    parked, other = Scripted([1, 2]), Scripted([3])
    several = FirstOf({"a": parked, "b": other}, lambda name, most: 0 if name == "a" else most)
    assert several.propose([[1]], 4, NOISE).source == "b"
    assert parked.asked == []


def test_all_abstain_where_nobody_knows() -> None:
    several = FirstOf({"a": Scripted([]), "b": Scripted([])}, lambda name, most: most)
    assert several.propose([[1]], 4, NOISE).size == 0


def test_whether_any_would_draft_is_told_without_drafting() -> None:
    silent, talker = Scripted([]), Scripted([3])
    limits = {"a": 4, "b": 4}
    several = FirstOf({"a": silent, "b": talker}, lambda name, most: limits[name])
    assert several.ready([[1]], 4)
    limits["b"] = 0
    assert not several.ready([[1]], 4)
    assert silent.asked == talker.asked == []


def test_hidden_states_are_those_that_any_of_them_needs() -> None:
    several = FirstOf({"a": Scripted([]), "b": Scripted([], ("final",))}, lambda name, most: most)
    assert several.taps == ("final",)


def test_each_source_has_its_own_length_within_the_room() -> None:
    lengths = LengthsBySource({"a": FixedLength(7), "b": FixedLength(3)})
    assert lengths.choose(20) == 7
    assert (lengths.limit("a", 7), lengths.limit("b", 7)) == (7, 3)
    assert lengths.choose(5) == 4 and lengths.limit("a", 4) == 4


def test_verdicts_go_to_their_source_and_plain_steps_to_all() -> None:
    good, bad = AutoLength(), AutoLength()
    lengths = LengthsBySource({"good": good, "bad": bad})
    for _ in range(120):
        lengths.choose(1000)
        for source, share in (("good", 1.0), ("bad", 0.0)):
            count = lengths.limit(source, 16)
            if count:
                kept = round(share * count)
                lengths.on_round(a_round(count, kept, 1.0 + 0.05 * count, source=source))
            else:
                lengths.on_round(a_round(0, 0, 1.0))
    assert lengths.limit("good", 16) > 4
    assert lengths.limit("bad", 16) == 0
    assert {change.source for change in lengths.changes} == {"good", "bad"}
    assert set(lengths.learning) == {"good", "bad"} and lengths.learning["good"].learned()


RIVALS = ("draft", "heads")
STEP = {0: Learned(1.0, 8.0)}


class Racers:
    """Rounds of two rivals: every other one keeps 0.6 of what it drafts, and each takes its
    time."""

    def __init__(
        self, costs: dict[str, float], known: dict[str, dict[int, float | Learned]]
    ) -> None:
        self.costs = costs
        self.each = {name: Rival(known.get(name), source=name) for name in costs}
        self.lengths = LengthsBySource(self.each)
        self.drafted: list[str] = []
        self.clock = 0.0

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            self.lengths.choose(10_000)
            wanted = {name: self.lengths.limit(name, 16) for name in self.costs}
            asked = [name for name, count in wanted.items() if count]
            assert len(asked) <= 1
            source = asked[0] if asked else ""
            count = wanted.get(source, 0)
            kept = round(0.6 * count) if number % 2 and count else 0
            seconds = 1 + count * self.costs[source] if count else 1.0
            self.lengths.on_round(a_round(count, kept, seconds, source=source))
            self.drafted.append(source)
            self.clock += seconds


@pytest.mark.parametrize("better", ["draft", "heads"])
def test_of_two_rivals_the_faster_one_drafts_and_both_are_tried(better: str) -> None:
    costs = dict.fromkeys(RIVALS, 0.25) | {better: 0.05}
    racers = Racers(costs, {})
    racers.run(400)
    assert set(racers.drafted) == {"", "draft", "heads"}
    assert racers.drafted.count(better) > 0.9 * len(racers.drafted)


@pytest.mark.parametrize("better", ["draft", "heads"])
def test_the_rival_that_earlier_texts_found_faster_begins(better: str) -> None:
    known = {
        name: {n: 1 + n * (0.02 if name == better else 0.2) for n in range(1, 17)} | STEP
        for name in RIVALS
    }
    lengths = Racers(dict.fromkeys(known, 0.1), known).lengths
    assert lengths.choose(100) > 0
    assert {name for name in RIVALS if lengths.limit(name, 1)} == {better}


def test_a_rival_that_was_known_to_be_slower_is_tried_again_where_the_budget_pays() -> None:
    known = {
        "draft": {n: 1 + 0.1 * n for n in range(1, 17)} | STEP,
        "heads": {n: 1 + 1.5 * n for n in range(1, 17)} | STEP,
    }
    racers = Racers({"draft": 0.1, "heads": 0.01}, known)
    racers.run(300)
    assert racers.drafted[-100:].count("heads") > 90


def test_trials_of_a_hopeless_rival_cost_little() -> None:
    racers = Racers({"draft": 0.05, "heads": 3.0}, {})
    racers.run(1000)
    alone = Racers({"draft": 0.05}, {})
    alone.run(1000)
    assert racers.clock < 1.05 * alone.clock
