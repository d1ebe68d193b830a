"""How many tokens to draft: what is chosen, from which arms, and what trials may lose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mlx_specdec.draft_length.auto_length import EVERY, SAVED, AutoLength, Source
from mlx_specdec.draft_length.costs import MOST, READING, Block, unknown
from mlx_specdec.draft_length.length import DraftLength, FixedLength
from mlx_specdec.draft_length.saved import Knowledge, as_knowledge, costs_of
from mlx_specdec.errors import OptionError
from mlx_specdec.interfaces.results import RoundReport, SequenceRound

from ..support.draft_length_simulator import (
    CURVES,
    DRAFT,
    LOOKUP,
    SLOW_BLAS,
    TWO_CORES,
    Files,
    Machine,
    Texts,
    a_round,
    bimodal,
    constant,
    drifting,
    hear,
    verify_cost,
)

Round = Callable[[int], tuple[int, float]]
HEADS = Source("heads", costs="heads", text="heads")


def known(
    costs: list[float], alpha: float, budget: float = 0.0, rows: int = 1, sure: float = 1e-3
) -> Knowledge:
    """What many texts would have taught of costs from one drafted token on, and of acceptance."""
    mean, covariance = unknown()
    mean = mean.copy()
    mean[:MOST] = np.log(costs)
    reached = 100 * alpha ** np.arange(MOST)
    covariance[:MOST, :MOST] *= sure
    return {
        **as_knowledge({"draft": {rows: Block(mean, covariance)}}),
        "counts draft": np.array([reached, alpha * reached]),
        "budget": np.array(budget),
    }


def rounds_of(lengths: AutoLength, count: int, what: Round, room: int = 10_000) -> list[int]:
    """What is drafted in so many rounds; what: accepted tokens and seconds of each."""
    drafted = []
    for number in range(count):
        drafted.append(lengths.choose(room))
        accepted, seconds = what(drafted[-1])
        hear(lengths, a_round(drafted[-1], accepted, seconds, position=number))
    return drafted


def test_a_fixed_length_is_cut_where_the_text_ends() -> None:
    assert [FixedLength(4).choose(room) for room in (1, 2, 5, 9)] == [0, 1, 4, 4]
    with pytest.raises(OptionError, match="0 or more"):
        FixedLength(-1)


def test_published_points_are_met_and_joined() -> None:
    curve = CURVES["M4 Pro 4-bit"]
    assert [verify_cost(curve, m) for m in (1, 4, 8)] == [1.0, 1.43, 2.84]
    assert verify_cost(curve, 6) == pytest.approx(2.1133, abs=1e-3)


@pytest.mark.parametrize("room", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [1, 3, 16])
def test_neither_the_room_nor_the_proposers_most_is_overrun(room: int, most: int) -> None:
    lengths = AutoLength([Source(most=most)])
    drafted = rounds_of(lengths, 60, lambda n: (n, 1.0 + 0.01 * n), room)
    assert max(drafted) <= min(most, room - 1)


def test_asking_changes_nothing_in_whatever_order() -> None:
    sources = (LOOKUP, DRAFT)
    queried, silent = AutoLength(sources), AutoLength(sources)
    machine = Machine(CURVES["M5 Max 70B"], 0.1, constant(0.7), matches=0.3, lookup=0.5)

    class Curious(DraftLength):
        def choose(self, remaining: int, rows: int = 1) -> int:
            queried.limit("ngram", 16, 5)
            queried.choose(4, 8)
            first = queried.choose(remaining, rows)
            for size in (16, 1, 3):
                assert queried.limit("draft", 16, size) <= 16
            queried.prices("draft")
            assert queried.changes == queried.changes and queried.knowledge["budget"] > -4
            return first

        def on_round(self, report: RoundReport) -> None:
            hear(queried, report)
            hear(silent, copy.copy(report))

    for seed in range(3):
        machine.time(Curious(), 80, seed)
    for rows in (1, 2, 16):
        assert queried.choose(100, rows) == silent.choose(100, rows)
    assert queried.changes == silent.changes
    one, other = queried.knowledge, silent.knowledge
    assert set(one) == set(other) and "costs 1 free" in one
    assert all((array == other[name]).all() for name, array in one.items())


def test_what_is_known_decides_the_first_round() -> None:
    flat, steep = [1.0] * MOST, [1.0 + 1.2 * n for n in range(1, MOST + 1)]
    assert AutoLength([DRAFT], known(flat, 0.95)).choose(100) > 8
    assert AutoLength([DRAFT], known(steep, 0.8)).choose(100) == 0
    assert AutoLength([DRAFT], known(flat, 0.95)).eager("draft")
    assert not AutoLength([DRAFT], known(steep, 0.8)).eager("draft")


def test_a_hopeless_draft_is_given_up_and_tried_again_now_and_then() -> None:
    lengths = AutoLength([DRAFT])
    drafted = rounds_of(lengths, 2000, lambda n: (0, 1.0 + 0.3 * n))
    lost = sum(0.3 * n for n in drafted)
    assert lost < 0.04 * 2000
    assert sum(n > 0 for n in drafted[1000:]) > 0


@pytest.mark.parametrize(("draft", "dropped"), [(10.0, True), (5.0, True), (0.3, False)])
def test_a_draft_that_is_too_expensive_is_dropped_after_its_first_round(
    draft: float, dropped: bool
) -> None:
    class Counted(AutoLength):
        drafts = 0

        def on_round(self, report: RoundReport) -> None:
            self.drafts += report.size > 0
            super().on_round(report)

    machine = Machine(CURVES["flat"], draft, constant(0.9), noise=0.1, prompt=20)
    for seed in range(5):
        machine.time(lengths := Counted([DRAFT]), 200, seed)
        assert (lengths.drafts == 1) == dropped and lengths.drafts > 0


def test_a_draft_that_turns_good_is_taken_up_again() -> None:
    lengths = AutoLength([DRAFT])
    rounds_of(lengths, 200, lambda n: (0, 1.0 + 0.15 * n))
    drafted = rounds_of(lengths, 800, lambda n: (n, 1.0 + 0.15 * n))
    assert min(drafted[-20:]) > 4


def test_a_flat_curve_ends_far_from_a_steep_one() -> None:
    flat, steep = AutoLength([DRAFT]), AutoLength([DRAFT])
    assert min(rounds_of(flat, 600, lambda n: (n, 1.0 + 0.02 * n))[-50:]) >= 12
    drafted = rounds_of(steep, 600, lambda n: (0, 1.0 + 0.9 * n))
    assert 0.9 * sum(drafted[100:]) < 0.025 * 500


@pytest.mark.parametrize("at", [0, 3, 4, 150])
def test_one_stalled_round_changes_nothing(at: int) -> None:
    lengths, number = AutoLength([DRAFT]), iter(range(1000))

    def what(n: int) -> tuple[int, float]:
        return n // 2 + 1 if n else 0, (1.0 + 0.1 * n) * (50 if next(number) == at else 1)

    drafted = rounds_of(lengths, 300, what)
    assert np.mean([n > 0 for n in drafted[200:]]) > 0.5


def test_a_plain_step_that_fills_or_empties_the_pipeline_tells_no_cost() -> None:
    lengths = AutoLength([DRAFT])
    for _ in range(3):
        hear(lengths, a_round(0, 0, 1.0))
    known = costs_of(lengths.knowledge, "draft")[1]
    drained = replace(a_round(0, 0, 0.1), pipelined=False)
    for report in (drained, a_round(0, 0, 4.0)) * 20:
        hear(lengths, report)
    later = costs_of(lengths.knowledge, "draft")[1]
    assert (later.mean == known.mean).all()


def test_a_debt_is_never_larger_than_what_a_text_can_save() -> None:
    lengths = AutoLength([DRAFT])
    rounds_of(lengths, 30, lambda n: (0, 1.0 if n == 0 else 1e6))
    assert lengths.knowledge["budget"] >= -SAVED
    rounds_of(AutoLength([DRAFT]), 30, lambda n: (n, 0.0))


def test_changes_say_what_was_promised() -> None:
    lengths = AutoLength([DRAFT])
    rounds_of(lengths, 200, lambda n: (n, 1.0 + 0.1 * n))
    last = lengths.changes[-1]
    assert last.length > 4 and not last.source
    assert last.speed == pytest.approx((last.length + 1) / (1 + 0.1 * last.length), rel=0.3)
    assert [change.round for change in lengths.changes] == sorted(
        change.round for change in lengths.changes
    )


def test_what_has_to_be_read_is_paid_for_and_no_cost_of_a_length() -> None:
    lengths = AutoLength([DRAFT], known([1.0 + 0.2 * n for n in range(1, MOST + 1)], 0.8))
    for number in range(60):
        # Ten plain steps, whose tokens a draft then reads.
        for _ in range(10):
            hear(lengths, a_round(0, 0, 1.0, position=number))
        hear(lengths, a_round(2, 1, 1.4 + 10 * 0.03, position=number))
    costs = np.exp(costs_of(lengths.knowledge, "draft")[1].mean[:3])
    assert costs == pytest.approx([1.2, 1.4, 1.6], rel=0.2)


def test_of_several_that_take_time_one_drafts_and_the_faster_one_wins() -> None:
    cost = {"draft": 0.25, "heads": 0.05}
    for better in cost:
        each = dict.fromkeys(cost, 0.25) | {better: 0.05}
        lengths = AutoLength([DRAFT, HEADS])
        drafted = []
        for number in range(500):
            limits = {name: lengths.limit(name, 16) for name in cost}
            [name] = [name for name, count in limits.items() if count] or [""]
            count = limits.get(name, 0)
            accepted = round(0.6 * count) if number % 2 else 0
            seconds = 1 + each.get(name, 0.0) * count
            hear(lengths, a_round(count, accepted, seconds, name, number))
            drafted.append(name)
        assert drafted[-200:].count(better) > 150


@pytest.mark.parametrize(("right", "least"), [(0.05, 0.93), (0.9, 1.05)])
def test_lookup_before_a_draft_falls_silent_where_it_is_often_wrong(
    right: float, least: float
) -> None:
    speeds = []
    for matches in (0.0, 0.2):
        texts = Texts(Machine(TWO_CORES, 0.15, constant(0.6), matches=matches, lookup=right), 80)
        texts.run(range(100, 120))
        speeds.append(texts.run(range(30)))
    assert speeds[1] > least * speeds[0]


def a_batch(drafted: int, accepted: int, rows: int, seconds: float) -> RoundReport:
    its = SequenceRound(drafted, accepted, accepted + 1, 5, range(20))
    report = a_round(drafted, accepted, seconds)
    return replace(report, sequences=(its,) * rows)


def test_what_hardly_pays_is_drafted_for_one_sequence_and_not_in_a_batch() -> None:
    # One drafted token is half accepted: 1.5 tokens for the price of 1.42.
    costs = [1.0 + 0.42 * n for n in range(1, MOST + 1)]
    for rows, drafts in ((1, True), (16, False)):
        lengths = AutoLength([DRAFT], known(costs, 0.5, -SAVED, rows))
        assert (lengths.choose(1000, rows) == 1) is drafts


@pytest.mark.parametrize(
    ("dear", "even", "waiting", "drafts"),
    [
        # One drafted token is half accepted: 1.5 tokens for the price of 1.32, or of 1.22.
        (0.32, False, False, False),
        (0.32, False, True, True),
        (0.22, False, False, True),
        (0.22, True, False, False),
    ],
)
def test_drafts_in_a_batch_must_pay_for_places_that_stay_empty(
    dear: float, even: bool, waiting: bool, drafts: bool
) -> None:
    costs = [1.0 + dear * n for n in range(1, MOST + 1)]
    lengths = AutoLength([DRAFT], known(costs, 0.5, -SAVED, 16))
    its = a_batch(0, 0, 16, 1.0)
    rows = tuple(
        replace(each, left=20 if even else 20 + row) for row, each in enumerate(its.sequences)
    )
    for _ in range(2 * EVERY):
        hear(lengths, replace(its, sequences=rows, pipelined=True, waiting=waiting))
    assert (lengths.choose(1000, 16) == 1) is drafts


def test_a_text_that_begins_with_drafts_learns_from_several_rounds_at_once() -> None:
    costs = [1.0 + 0.1 * n for n in range(1, MOST + 1)]
    lengths = AutoLength([DRAFT], known(costs, 0.9, -SAVED))
    learned = []
    for number in range(11 * EVERY):
        count, before = lengths.choose(1000), lengths.knowledge[f"counts {DRAFT.text}"]
        assert count > 0 and lengths.prices(DRAFT.name) is not None
        lengths.on_round(a_round(count, count, 1.0 + 0.1 * count, position=number + 1))
        lengths.meanwhile()
        if not np.array_equal(lengths.knowledge[f"counts {DRAFT.text}"], before):
            learned.append(number)
    assert learned == [EVERY - 1, 6 * EVERY - 1, 11 * EVERY - 1]


def test_a_text_that_drafts_nothing_is_learned_from_less_often() -> None:
    def learned(lengths: AutoLength, rows: int) -> list[int]:
        rounds, budget = [], lengths.knowledge["budget"]
        for number in range(1, 31):
            lengths.on_round(a_batch(0, 0, rows, 1.0 + 10.0 * (number == 8)))
            lengths.meanwhile()
            if (now := lengths.knowledge["budget"]) != budget:
                rounds.append(number)
            budget = now
        return rounds

    hopeless = known([2.0 + n for n in range(MOST)], 0.2, -SAVED, sure=1e-6)
    lengths = AutoLength([DRAFT], hopeless)
    assert learned(lengths, 1) == [5 * EVERY, 10 * EVERY]
    # The middle one of the plain steps does not see that one stalled.
    costs = costs_of(lengths.knowledge, "draft")[1]
    assert np.exp(costs.mean[0]) == pytest.approx(2.0, rel=0.05)
    assert learned(AutoLength([DRAFT], hopeless), 2) == list(range(EVERY, 31, EVERY))


@pytest.mark.parametrize(("budget", "tried"), [(1.0, True), (-0.1, True), (-0.5, False)])
def test_in_debt_only_what_is_expected_to_gain_as_much_is_tried(budget: float, tried: bool) -> None:
    # One drafted token gains a fifth of a step, but nothing at one standard error more.
    costs = [1.0 + 0.3 * n for n in range(1, MOST + 1)]
    lengths = AutoLength([DRAFT], known(costs, 0.6, budget, sure=0.3))
    assert (lengths.choose(1000) > 0) is tried and lengths.prices(DRAFT.name) is None


def test_a_plan_counts_from_the_round_after_the_one_in_flight() -> None:
    lengths = AutoLength([DRAFT], known([1.0 + 0.1 * n for n in range(1, MOST + 1)], 0.9))
    longest = 0
    for number in range(200):
        before = lengths.choose(1000)
        lengths.meanwhile()
        assert lengths.choose(1000) == before
        accepted = before if number < 20 else 0
        lengths.on_round(a_round(before, accepted, 1.0 + 0.1 * before, position=number + 1))
        longest = before if number < 20 else longest
    assert before < longest


def test_a_new_size_begins_with_what_its_neighbors_know_and_sizes_learn_apart() -> None:
    lengths = AutoLength([DRAFT], known([1.0 + 0.05 * n for n in range(1, MOST + 1)], 0.8))
    assert lengths.choose(1000, 2) > 0
    for _ in range(300):
        count = lengths.choose(1000, 16)
        hear(lengths, a_batch(count, min(count, 3), 16, 1.0 + 2.0 * count))
    assert lengths.choose(1000, 16) == 0 and lengths.choose(1000, 1) > 0
    assert lengths.choose(1000, 9) == lengths.choose(1000, 16)


def test_a_larger_batch_begins_with_what_passes_over_as_many_tokens_cost() -> None:
    curve = {1: 1.0, 2: 2.0, 8: 2.0, 17: 4.25}
    costs = [verify_cost(curve, n + 1) for n in range(1, MOST + 1)]
    block = costs_of(known(costs, 0.8), "draft")[1]
    # Two tokens cost two steps, and four of two rows no more than two.
    assert np.exp(block.resized(2).mean[[0, 2]]) == pytest.approx([1.0, 1.0])
    assert np.exp(block.resized(16).mean[[0, 2]]) == pytest.approx([2.0, 4.0], rel=0.01)
    assert np.array_equal(block.resized(1).mean, block.mean)
    # Reading takes 16 times as long, a plain step what a pass over 16 tokens does.
    took = np.exp(block.resized(16).mean[READING] - block.mean[READING])
    assert took == pytest.approx(16 / np.exp(block.mean[14]), rel=0.05)


def test_a_token_behind_the_end_of_a_text_counts_as_one_that_would_not_have_stayed() -> None:
    lengths = AutoLength([DRAFT], known([1.0] * MOST, 0.9))
    before = lengths.knowledge[f"counts {DRAFT.text}"]
    report = a_round(8, 8, 1.0)
    [its] = report.sequences
    last = replace(its, emitted=3, ended=True)
    lengths.on_round(replace(report, sequences=(last,), ended=True))
    verified, accepted = (lengths.knowledge[f"counts {DRAFT.text}"] - before).round().tolist()
    assert verified[:4] == [1, 1, 1, 0] and accepted[:4] == [1, 1, 0, 0]


def test_drafting_stops_when_the_context_makes_it_lose_and_comes_back() -> None:
    short = Machine(CURVES["M5 Max 70B"], 0.05, constant(0.7), 0.1, attention=2e-4)
    long = replace(short, context=32_000)
    texts = Texts(short, 100)
    texts.run(range(10))
    for machine in (long, short, long, short):
        texts.machine = machine
        best = machine.best_fixed(100, 6)[1]
        first = texts.run([200])
        assert first > 0.8 * machine.best_fixed(100, 1)[1] or first > 0.8
        assert texts.run(range(6)) > 0.9 * best


def test_a_text_that_begins_behind_a_long_context_is_planned_for_it() -> None:
    knowledge = known([1.0 + 0.2 * n for n in range(1, MOST + 1)], 0.8)
    costs_of(knowledge, "draft")[1].mean[MOST] = 0.2
    lengths = AutoLength([DRAFT], knowledge)
    for context, drafts in ((100, True), (64_000, False), (100, True)):
        lengths.begin(context, context, 1000)
        assert (lengths.choose(100) > 0) is lengths.eager("draft") is drafts


def test_a_prompt_is_read_only_for_a_text_that_can_gain_as_much() -> None:
    knowledge = known([1.0 + 0.2 * n for n in range(1, MOST + 1)], 0.8)
    costs_of(knowledge, "draft")[1].covariance[READING, READING] *= 1e-3
    lengths = AutoLength([DRAFT], knowledge)
    for remaining, drafts in ((1000, True), (20, False), (1000, True)):
        lengths.begin(8_000, 8_000, remaining)
        assert (lengths.choose(remaining) > 0) is lengths.eager("draft") is drafts


def test_a_late_text_begins_with_a_plain_step_and_drafts_then() -> None:
    lengths = AutoLength([DRAFT, LOOKUP], known([1.0 + 0.2 * n for n in range(1, MOST + 1)], 0.8))
    lengths.begin(100, 100, 1000, late=True)
    assert not lengths.eager("draft") and lengths.limit("draft", 8) == 0
    hear(lengths, a_round(0, 0, 1.0))
    assert lengths.choose(1000) > 0 and not lengths.eager("draft")
    lengths.begin(100, 100, 1000)
    assert lengths.eager("draft") and lengths.choose(1000) > 0
    # So does one of which nothing is known: its first draft tells what it costs to read as well.
    unknown_yet = AutoLength([DRAFT])
    unknown_yet.begin(1000, 1000, 1000, late=True)
    assert not unknown_yet.eager("draft")
    drafted = [unknown_yet.choose(1000)]
    for _ in range(6):
        count = drafted[-1]
        hear(unknown_yet, a_round(count, count, 11.0 if count and not any(drafted[:-1]) else 1.1))
        drafted.append(unknown_yet.choose(1000))
    assert drafted[0] == 0 and any(drafted)
    assert costs_of(unknown_yet.knowledge, "draft")[1].mean[0] < 0.5


def test_a_source_that_is_free_reads_no_prompt() -> None:
    def heard(lengths: AutoLength, prompt: int) -> AutoLength:
        lengths.begin(100, prompt, 1000, late=True)
        for size, source in ((0, ""), (0, ""), (3, LOOKUP.name)):
            hear(lengths, a_round(size, size, 1.0 + 0.1 * size, source=source))
        return lengths

    knowledge = heard(AutoLength([DRAFT, LOOKUP]), 100).knowledge
    short, long = (heard(AutoLength([DRAFT, LOOKUP], knowledge), each) for each in (100, 8000))
    mean, other = (costs_of(each.knowledge, LOOKUP.costs)[1].mean for each in (short, long))
    assert (mean == other).all()


def test_a_hopeless_draft_costs_a_file_of_short_texts_little() -> None:
    slow = Machine(SLOW_BLAS, 0.17, constant(0.45), 0.1, start=0.05, prompt=20, reading=0.2)
    for seed in range(4):
        texts = Texts(slow, 15)
        first = texts.run([1000 * seed])
        # The only draft costs two steps and has to read the source, which takes four more.
        assert first > 0.6 and 24 / (1 / first + 23 / texts.run(range(seed, seed + 23))) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curve", "draft", "acceptance"),
    [
        ("M4 Pro 4-bit", 0.1, constant(0.8)),
        ("M5 Max 70B", 0.1, drifting),
        ("M3 Ultra 4-bit", 0.3, constant(0.5)),
        ("linear", 0.1, constant(0.95)),
        ("flat", 0.3, bimodal),
    ],
)
def test_long_texts_come_near_the_best_length_and_never_far_below_plain(
    curve: str, draft: float, acceptance: Callable[[int], float]
) -> None:
    machine = Machine(CURVES[curve], draft, acceptance)
    speed = machine.speed(lambda: AutoLength([DRAFT]), 1500, 4)
    assert speed > 0.97 and speed > 0.86 * machine.best_fixed(1500, 4)[1]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.7)),
        Machine(CURVES["M5 Max 70B"], 0.1, constant(0.5)),
        Machine(CURVES["M3 Ultra 4-bit"], 0.1, constant(0.3)),
        Machine(CURVES["linear"], 0.3, constant(0.8), drift=0.4),
        Machine(CURVES["M4 Pro 4-bit"], 0.02, constant(0.8), drift=0.4),
        Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.7), stalls=0.05),
        Machine(CURVES["linear"], 0.1, constant(0.0), stalls=0.05),
    ],
)
@pytest.mark.parametrize("tokens", [12, 100])
def test_texts_that_follow_others_come_near_the_best(machine: Machine, tokens: int) -> None:
    texts = Texts(machine, tokens, abrupt=tokens == 12)
    texts.run(range(100, 120))
    assert texts.run(range(20)) > 0.85 * machine.best_fixed(tokens, 20, abrupt=tokens == 12)[1]


@pytest.mark.parametrize("poison", [0.1, 0.5, 2.0])
def test_costs_of_a_bad_day_mend_themselves_within_ten_texts(poison: float) -> None:
    machine = Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.7), 0.15)
    wrong = known([poison * cost for cost in machine.costs()[1:]], 0.7, sure=0.1)
    texts = Texts(machine, 60, wrong)
    texts.run(range(100, 110))
    assert texts.run(range(10)) > 0.85 * machine.best_fixed(60, 10)[1]


@pytest.mark.parametrize(
    ("curve", "alpha", "draft", "size", "share"),
    [
        ("linear", 0.5, 0.2, 16, 0.95),
        ("M4 Pro 4-bit", 0.8, 0.05, 4, 0.85),
        ("flat", 0.1, 0.2, 4, 0.9),
        ("M3 Ultra 4-bit", 0.1, 0.2, 64, 0.95),
    ],
)
def test_batches_come_near_the_best_length_once_a_file_was_decoded(
    curve: str, alpha: float, draft: float, size: int, share: float
) -> None:
    texts = [6, 10, 12, 14, 20, 30, 12, 14] * (size // 2)
    several = Files(Machine(CURVES[curve], draft, constant(alpha), 0.15), texts, size)
    first, *later = several.auto(3, 3)
    best = min(several.fixed(3).values())
    assert best / first > 0.75
    assert all(best / took > share for took in later)
