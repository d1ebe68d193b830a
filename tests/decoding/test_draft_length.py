"""The controller alone and in the simulator: never far below plain, near the best fixed length."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mlx_specdec.draft_length.acceptance import Acceptance
from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.budget import Budget
from mlx_specdec.draft_length.by_rows import LengthsByRows
from mlx_specdec.draft_length.by_source import LengthsBySource
from mlx_specdec.draft_length.choice import Choice
from mlx_specdec.draft_length.experience import Experience
from mlx_specdec.draft_length.learned import Learned
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.draft_length.online import RoundCosts
from mlx_specdec.draft_length.unread import Unread
from mlx_specdec.errors import OptionError
from mlx_specdec.interfaces.rounds import RoundReport

from ..support.mocks import a_round
from .batch_simulator import BatchMachine
from .simulator import CURVES, Machine, Texts, bimodal, constant, drifting, verify_cost

STEP = {0: Learned(1.0, 8.0)}
"""That a plain step took a second in earlier texts."""
TWO_CORES = {1: 1.0, 2: 1.25, 3: 1.4, 4: 1.5, 6: 1.7, 9: 2.0, 16: 3.0}
"""Roughly as a model of eight million weights behaves on two cores."""
POISONED = (("M4 Pro 4-bit", 0.8, 0.1), ("linear", 0.5, 0.3), ("M5 Max 70B", 0.95, 1.25))
"""A pair that pays, one that does not, and a target at fewer bits that drafts for itself."""
KINDS = {"0.1": constant(0.1), "0.5": constant(0.5), "0.9": constant(0.9)}
KINDS |= {"drifting": drifting, "bimodal": bimodal}


def test_a_fixed_length_is_cut_where_the_text_ends() -> None:
    lengths = FixedLength(5)
    assert [lengths.choose(room) for room in (1, 2, 6, 100)] == [0, 1, 5, 5]
    with pytest.raises(OptionError, match="num-draft"):
        FixedLength(-1)


def test_published_points_are_met_and_joined() -> None:
    curve = CURVES["M3 Ultra 4-bit"]
    assert verify_cost(curve, 8) == 6.12
    assert verify_cost(curve, 3) == pytest.approx((1.83 + 3.26) / 2)
    assert verify_cost(CURVES["linear"], 17) == pytest.approx(17)


@pytest.mark.parametrize("room", range(1, 8))
def test_the_room_is_never_overrun(room: int) -> None:
    lengths = AutoLength()
    for _ in range(60):
        count = lengths.choose(room)
        assert 0 <= count <= room - 1
        lengths.on_round(a_round(count, count, 1.0 + 0.01 * count))


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_is_asked_for_than_a_proposer_has(most: int) -> None:
    for known in (None, {1: 1.01, 2: 1.02, 12: 1.1} | STEP):
        lengths, chosen = AutoLength(known, most), []
        for _ in range(200):
            chosen.append(lengths.choose(10_000))
            lengths.on_round(a_round(chosen[-1], chosen[-1], 1.0 + 0.01 * chosen[-1]))
        assert max(chosen) == chosen[-1] == most


def test_it_does_not_think_while_a_proposer_abstains(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    plan = AutoLength._plan
    monkeypatch.setattr(AutoLength, "_plan", lambda self: plans.append(1) or plan(self))
    for known in (None, {count: 1 + 0.1 * count for count in range(1, 17)}):
        lengths = AutoLength(known)
        for _ in range(AutoLength.PLAIN_STEPS_FIRST):
            lengths.choose(10_000)
            lengths.on_round(a_round(0, 0, 1.0))
        asked = lengths.choose(10_000)
        plans.clear()
        for _ in range(200):
            assert lengths.choose(10_000) == asked > 0
            lengths.on_round(a_round(0, 0, 1.0))
        assert plans == []
        for _ in range(AutoLength.PLANS_EVERY):
            lengths.on_round(a_round(lengths.choose(10_000), 1, 1.2))
        assert plans


def test_a_plain_step_that_fills_the_pipeline_again_tells_no_cost() -> None:
    lengths = AutoLength()
    for seconds in (1.0,) * 8:
        lengths.choose(10_000)
        lengths.on_round(a_round(0, 0, seconds))
    assert lengths.plain == pytest.approx(1.0)
    drained = replace(a_round(0, 0, 0.1), pipelined=False)
    for report in (drained, a_round(0, 0, 4.0)) * 20:
        lengths.choose(10_000)
        lengths.on_round(report)
    assert lengths.plain == pytest.approx(1.0)


def test_a_hopeless_draft_is_parked_and_still_probed() -> None:
    lengths, chosen = AutoLength(), []
    for _ in range(3000):
        count = lengths.choose(10_000)
        chosen.append(count)
        lengths.on_round(a_round(count, 0, 1.0 if count == 0 else 2.0 + 0.1 * count))
    assert chosen.count(0) > 0.98 * len(chosen)
    assert any(chosen[1500:])


def test_a_draft_that_turns_good_is_taken_up_again() -> None:
    lengths = AutoLength()
    for index in range(4000):
        count = lengths.choose(10_000)
        if index == 300:
            assert lengths.changes[-1].length == 0
        lengths.on_round(a_round(count, count if index > 400 else 0, 1.0 + 0.15 * count))
    assert lengths.choose(10_000) >= 4


def test_a_flat_curve_ends_far_from_a_steep_one() -> None:
    lengths = AutoLength()
    for _ in range(200):
        count = lengths.choose(10_000)
        lengths.on_round(a_round(count, count, 1.0 + 0.02 * count))
    assert lengths.choose(10_000) == AutoLength.LONGEST_DRAFT
    steep = AutoLength()
    for _ in range(200):
        count = steep.choose(10_000)
        steep.on_round(a_round(count, 0, 1.0 + 0.9 * count))
    assert steep.changes[-1].length == 0


def test_one_stalled_round_changes_nothing() -> None:
    lengths = AutoLength()
    for index in range(300):
        count = lengths.choose(10_000)
        seconds = 1.0 + 0.1 * count
        lengths.on_round(a_round(count, count, 50 * seconds if index == 150 else seconds))
        if index >= 100:
            assert count == AutoLength.LONGEST_DRAFT


def test_known_costs_decide_the_first_round() -> None:
    cheap = AutoLength({n: 1.0 + 0.01 * n for n in range(1, 17)} | STEP)
    assert cheap.choose(100) > 4
    dear = AutoLength({n: 1.0 + 1.5 * n for n in range(17)})
    assert dear.choose(100) <= 1
    assert AutoLength().choose(100) == 0


def test_known_costs_of_some_lengths_are_joined_by_lines() -> None:
    lengths = AutoLength({2: 1.2, 8: 1.8} | STEP)
    chosen = lengths.choose(100)
    assert chosen > 0
    for _ in range(100):
        count = lengths.choose(1000)
        lengths.on_round(a_round(count, count, 3.0 * (1 + 0.1 * count)))
    assert lengths.choose(1000) == AutoLength.LONGEST_DRAFT


def test_what_a_text_taught_is_told_in_plain_steps() -> None:
    lengths = AutoLength()
    for _ in range(60):
        count = lengths.choose(1000)
        lengths.on_round(a_round(count, count // 2, 0.2 * (1 + 0.3 * count)))
    learned = {n: each for n, each in lengths.learned().items() if n}
    assert learned
    assert all(each.cost == pytest.approx(1 + 0.3 * n, rel=0.01) for n, each in learned.items())
    assert learned[max(learned, key=lambda n: learned[n].rounds)].rounds > 5


def test_changes_say_what_was_promised() -> None:
    lengths = AutoLength({n: 1.0 + 0.1 * n for n in range(1, 17)} | STEP)
    first = lengths.changes[0]
    assert (first.round, first.length) == (0, lengths.choose(100))
    assert first.speed > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*CURVES][:2] + [pytest.param(name, marks=pytest.mark.slow) for name in [*CURVES][2:]]
)
def test_long_texts_come_near_the_best_length_and_never_far_below_plain(
    name: str, kind: str
) -> None:
    # A cheap draft and a dear one: both with every curve and with every kind of text.
    draft = (0.02, 0.3)[([*CURVES].index(name) + [*KINDS].index(kind)) % 2]
    machine = Machine(CURVES[name], draft, KINDS[kind])
    known = costs_of(machine) | STEP
    # Where the text changes, both have to meet the same stretches of it.
    after = 40 if kind[0] == "0" else 0
    best = machine.best_fixed(600, 2, after)[1]
    for make, share, plain in (
        (lambda: AutoLength(known), 0.85, 0.94),
        (AutoLength, 0.75, 0.85),
    ):
        auto = machine.speed(make, 600, 4, after)
        assert auto >= plain, (draft, auto)
        assert auto >= share * best, (draft, auto / best)


@pytest.mark.parametrize("name", CURVES)
def test_short_texts_are_not_far_below_plain(name: str) -> None:
    for draft in (0.02, 0.3):
        for kind in KINDS.values():
            machine = Machine(CURVES[name], draft, kind)
            known = costs_of(machine) | STEP
            assert machine.speed(lambda k=known: AutoLength(k), 100, 4) >= 0.90
            assert machine.speed(AutoLength, 100, 4) >= 0.80


@pytest.mark.parametrize("known", [{1: 1.3}, {4: 2.6}, {1: 1.3, 16: 6.0}])
def test_a_few_costs_of_earlier_texts_are_no_trap(known: dict[int, float]) -> None:
    # They are plain steps, what this text measures is seconds: the two must not be compared.
    curve = {1: 1.0, 2: 1.2, 16: 5.6}
    machine = Machine(curve, 0.1, constant(0.6))
    auto = machine.speed(lambda: AutoLength(known), 100, 12)
    assert auto > 0.86 * machine.best_fixed(100, 12)[1]

    quick, chosen = AutoLength(known), []
    for _ in range(60):
        chosen.append(quick.choose(1000))
        quick.on_round(a_round(chosen[-1], min(chosen[-1], 1), 0.004 * (1.0 + 0.3 * chosen[-1])))
    assert sum(count <= 2 for count in chosen) > 45


def costs_of(machine: Machine) -> dict[int, float]:
    return dict(enumerate(machine.costs()[1:], start=1))


@pytest.mark.parametrize("poison", [10.0, 100.0, 0.1])
def test_costs_that_are_wrong_mend_themselves_within_ten_texts(poison: float) -> None:
    machine = Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.8))
    wrong = {length: cost * poison for length, cost in costs_of(machine).items()}
    texts = Texts(machine, 12, wrong)
    texts.run(range(10))
    best = machine.best_fixed(12, 40)[1]
    assert texts.run(range(40)) > 0.85 * best


@pytest.mark.parametrize("saved", [0.0, -12.0])
@pytest.mark.parametrize("poison", [0.5, 1.5, 3.0])
@pytest.mark.parametrize(("name", "alpha", "draft"), POISONED)
def test_so_do_those_of_a_noisy_machine_that_held_them_against_its_plain_steps(
    name: str, alpha: float, draft: float, poison: float, saved: float
) -> None:
    machine = Machine(CURVES[name], draft, constant(alpha), noise=0.15, reading=0.5)
    wrong: dict[int, float | Learned] = {n: c * poison for n, c in costs_of(machine).items()}
    wrong[0] = Learned(1 / min(1.0, poison), 8.0)
    texts = Texts(machine, 12, wrong, Experience(((), ()), saved, 0.5))
    texts.run(range(10 if saved == 0 else 16))
    best = machine.best_fixed(12, 40)[1]
    assert texts.run(range(40)) > 0.78 * best


def test_a_debt_is_no_larger_than_what_a_text_can_have_owed_knowingly() -> None:
    budget = Budget(1.0)
    budget.spend(50.0)
    assert budget.saved(1.0) == -Budget.MOST_OWED
    assert budget.saved(1.0, 2.0) == -Budget.MOST_OWED - 2
    assert budget.saved(1.0, 99.0) == -Budget.MOST_OWED - Budget.MOST_OWED_FOR_READING


def test_no_leap_reads_a_prompt_that_the_budget_cannot_pay_for() -> None:
    costs = {1: Learned(2.7, 2.0), 3: Learned(4.6, 2.0)} | STEP
    for saved, leaps in ((0.5, False), (3.0, True)):
        acceptance = Acceptance(16, earlier=((200.0,) * 16, (190.0,) * 16))
        lengths = AutoLength(costs, acceptance=acceptance, budget=Budget(saved), reading=5.0)
        chosen = []
        for _ in range(12):
            chosen.append(lengths.choose(1000))
            lengths.on_round(a_round(0, 0, 1.0))
        assert (max(chosen) > 3) is leaps, chosen


def test_a_probe_of_a_length_that_this_text_has_measured_is_one_round() -> None:
    lengths, chosen = AutoLength(), []
    for _ in range(3000):
        chosen.append(lengths.choose(10_000))
        lengths.on_round(a_round(chosen[-1], 0, 2.0 + 0.1 * chosen[-1] if chosen[-1] else 1.0))
    late = chosen[1500:]
    assert any(late) and not any(one and other for one, other in pairwise(late))


@pytest.mark.parametrize(("seconds", "longer"), [(0.7, 0.9), (2.8, 3.6), (1.3, 1.8)])
def test_what_one_length_refutes_is_wrong_for_all(seconds: float, longer: float) -> None:
    # Earlier texts held 1.4 steps against a draft of two tokens, and 1.8 against one of four.
    costs = RoundCosts(4, {n: 1 + 0.2 * n for n in range(1, 5)})
    for _ in range(4):
        costs.add(0, 1.0, None)
    costs.add(2, seconds, None)
    assert costs.totals()[4] == pytest.approx(longer, rel=0.06)


@pytest.mark.parametrize("name", ["M3 Ultra bf16", "M4 Pro 4-bit", "flat", "linear"])
@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9])
def test_short_texts_that_follow_others_come_near_the_best(name: str, alpha: float) -> None:
    machine = Machine(CURVES[name], 0.15, constant(alpha))
    texts = Texts(machine, 12, costs_of(machine))
    texts.run(range(5))
    reached, best = texts.run(range(60)), machine.best_fixed(12, 60)[1]
    assert reached > 0.84 * best


def test_bad_luck_at_the_beginning_does_not_end_drafting() -> None:
    machine = Machine(TWO_CORES, 0.22, constant(0.68))
    starts = range(0, 24_000, 1000)
    reached = [Texts(machine, 100).run(range(start, start + 8)) for start in starts]
    assert sum(each < 1.005 for each in reached) <= 2 and sum(reached) / len(reached) > 1.09


def test_few_verdicts_are_doubted_and_decide_nothing() -> None:
    acceptance = Acceptance(4)
    doubts = [acceptance.doubt]
    for _ in range(6):
        assert acceptance.undecided
        acceptance.add([(1, 0)])
        doubts.append(acceptance.doubt)
    assert not acceptance.undecided and doubts == sorted(doubts, reverse=True)
    acceptance.add([(1, 1)])
    assert acceptance.undecided
    later = Acceptance(4, earlier=((40.0,) * 4, (20.0,) * 4))
    assert not later.undecided and later.doubt < doubts[-1]


def test_a_machine_that_gets_slower_and_faster_is_not_taken_for_costs() -> None:
    reached = {}
    for drift in (0.0, 0.4):
        machine = Machine(TWO_CORES, 0.12, constant(0.7), noise=0.1, drift=drift)
        reached[drift] = 0.0
        for start in range(0, 8000, 1000):
            texts = Texts(machine, 100)
            texts.run(range(start, start + 8))
            reached[drift] += texts.run(range(start + 8, start + 20)) / 8
    best = machine.best_fixed(100, 100)[1]
    assert reached[0.0] > 0.97 * best and reached[0.4] > 0.935 * best


def test_a_length_that_is_used_for_long_keeps_its_cost_on_a_machine_that_slows_down() -> None:
    costs = RoundCosts(4)
    for seconds in [1.0] * 20 + [1.5] * 20:
        costs.add(0, seconds, None)
        costs.add(2, 2 * seconds, None)
    for _ in range(40):
        costs.add(2, 6.0, None)
    assert costs.totals()[2] == pytest.approx(6.0) and costs.plain == pytest.approx(3.0, rel=0.05)
    assert costs.learned()[2].cost == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("known", [None, {n: 1.0 + 0.1 * n for n in range(1, 17)} | STEP])
def test_a_clock_that_stands_still_harms_nobody(known: dict[int, float | Learned] | None) -> None:
    lengths = AutoLength(known)
    for _ in range(60):
        count = lengths.choose(1000)
        lengths.on_round(a_round(count, count, 0.0))
    assert lengths.choose(1000) >= 0


def test_what_is_known_well_is_tried_less_and_debts_are_paid_all_the_same() -> None:
    few, many = (Acceptance(2, earlier=((n, n), (n, n))).settled for n in (80.0, 200.0))
    assert (few, many) == (0.0, 1.0)
    new, old, owing = Budget(0.0), Budget(0.0), Budget(-1.0)
    new.earn(100.0, few)
    old.earn(100.0, many)
    owing.earn(100.0, many)
    assert 0 < old.left(1.0) < 0.6 * new.left(1.0)
    assert owing.left(1.0) == pytest.approx(new.left(1.0) - 1)


def test_a_text_that_behaves_otherwise_is_believed_soon() -> None:
    machine = Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.05))
    always = ((1000.0,) * 16, (990.0,) * 16)
    acceptance = Acceptance(AutoLength.LONGEST_DRAFT, earlier=always)
    lengths = AutoLength(costs_of(machine), acceptance=acceptance, budget=Budget(0.0))
    machine.time(lengths, 60, 0)
    assert lengths.choose(100) <= 1


def test_what_no_text_ever_held_against_a_plain_step_is_measured_first() -> None:
    costs = {n: 1.0 + 0.1 * n for n in range(1, 17)}
    lengths, chosen = AutoLength(costs), []
    for _ in range(12):
        chosen.append(lengths.choose(1000))
        lengths.on_round(a_round(chosen[-1], chosen[-1], 3.0 * (1 + 0.1 * chosen[-1])))
    assert chosen[: AutoLength.PLAIN_STEPS_FIRST] == [0] * AutoLength.PLAIN_STEPS_FIRST
    assert all(chosen[AutoLength.PLAIN_STEPS_FIRST :])
    assert AutoLength(costs | STEP).choose(1000) > 0


def test_a_text_that_only_drafts_is_held_against_earlier_plain_steps() -> None:
    costs = {n: 1.0 + 0.1 * n for n in range(1, 17)}
    for rounds, learned in ((1.0, {16: (4.0, 0.5)}), (20.0, {})):
        # What is known well is not: the machine may have been faster or slower then.
        lengths = AutoLength({n: Learned(cost, rounds) for n, cost in costs.items()} | STEP)
        lengths.on_round(a_round(16, 16, 4.0))
        assert lengths.learned() == learned
    # Of itself alone a length says nothing.
    alone = AutoLength(costs)
    alone.on_round(a_round(4, 4, 4.0))
    assert alone.learned() == {}


def test_plain_steps_are_taken_again_out_of_the_budget() -> None:
    costs = {n: Learned(1.0 + 0.3 * n, 5.0) for n in range(1, 17)} | STEP
    rich, poor = (AutoLength(costs, budget=Budget(saved)) for saved in (3.0, -3.0))
    for lengths, plain in ((rich, True), (poor, False)):
        chosen = []
        for _ in range(10):
            chosen.append(lengths.choose(1000))
            lengths.on_round(a_round(chosen[-1], chosen[-1], 1.0 + 0.3 * chosen[-1]))
        assert (0 in chosen) == plain, chosen


def test_what_hardly_pays_is_drafted_for_one_sequence_and_not_in_a_batch() -> None:
    # One drafted token is half accepted: 1.5 tokens for the price of 1.42.
    costs = {n: Learned(1.0 + 0.42 * n, 50.0) for n in range(1, 17)} | {0: Learned(1.0, 50.0)}
    seen = ((1000.0, *(0.0,) * 15), (500.0, *(0.0,) * 15))
    for rows, drafts in ((1, True), (16, False)):
        acceptance = Acceptance(AutoLength.LONGEST_DRAFT, earlier=seen)
        lengths = AutoLength(costs, acceptance=acceptance, budget=Budget(-3.0), rows=rows)
        assert (lengths.choose(1000, rows) == 1) is drafts


class AmongSeveral:
    """A draft length of one source of several, which is asked again and again what it may draft."""

    def __init__(self, rows: int) -> None:
        seen = ((1000.0, *(0.0,) * 15), (500.0, *(0.0,) * 15))
        acceptance = Acceptance(AutoLength.LONGEST_DRAFT, earlier=seen)
        costs = {n: Learned(1.0 + 0.42 * n, 8.0) for n in range(1, 17)} | {0: Learned(1.0, 8.0)}
        self.own = AutoLength(costs, acceptance=acceptance, rows=rows)
        others = {"other": FixedLength(0)}
        self.lengths = LengthsByRows(lambda _: LengthsBySource({"own": self.own, **others}))
        self.wants_parts = False
        self.changes = ()

    def choose(self, remaining: int, rows: int = 1) -> int:
        count = self.lengths.choose(remaining, rows)
        assert self.lengths.limit("other", count) == 0
        assert {self.lengths.limit("own", count) for _ in range(3)} == {count}
        assert self.lengths.limit("own", 1) == min(1, count)
        return count

    def on_round(self, report: RoundReport) -> None:
        self.lengths.on_round(replace(report, source="own" if report.size else ""))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_source_of_several_learns_as_if_it_were_alone_however_often_it_is_asked(
    rows: int,
) -> None:
    machine, texts = BatchMachine(CURVES["M4 Pro 4-bit"], 0.1, 0.6), [20, 40, 60, 30] * rows
    asked, alone = AmongSeveral(rows), AmongSeveral(rows).own
    took = [machine.time(lengths, rows, texts, 1) for lengths in (asked, alone)]
    assert took[0] == took[1]
    assert asked.own.changes == alone.changes and len(alone.changes) > 0


def test_what_is_remembered_of_a_text_without_end_does_not_grow() -> None:
    choice, unread = Choice(), Unread(free=False, reading=1.0)
    for number in range(3 * Choice.KEPT):
        better = [3.0, 1.0] if number % 2 else [1.0, 3.0]
        choice.best([1.0, 1.0], better, (0, 1), rounds=number, rows=1, doubt=0.0)
        unread.read(1, 2.0 + number)
        unread.skip()
    assert len(choice.changes) == Choice.KEPT
    assert choice.changes[-1].round == 3 * Choice.KEPT - 1
    assert unread.prompt([1.0, 1.0], 1.0) == 1.0, "the first text's prompt"
    assert unread.price([1.0, 1.0], 1.0) == 3 * Choice.KEPT, "as the newest was"
    assert not [kept for kept in vars(unread).values() if isinstance(kept, list)]


@pytest.mark.parametrize("length", [1, 4])
def test_a_longer_draft_never_seems_cheaper_than_a_shorter_one(length: int) -> None:
    costs = RoundCosts(8, {1: 1.1, 2: Learned(0.3, 0.5), 4: 1.4, 8: Learned(1.0, 1.0)})
    totals = costs.totals()
    assert list(totals) == sorted(totals) and totals[0] == 1.0
    assert totals[length] == pytest.approx({1: 1.1, 4: 1.4}[length], rel=0.03)


@pytest.mark.parametrize(
    ("name", "alpha", "draft", "size", "share"),
    [
        ("linear", 0.5, 0.2, 16, 0.95),
        ("M4 Pro 4-bit", 0.8, 0.05, 4, 0.85),
        ("flat", 0.1, 0.2, 4, 0.9),
        ("M3 Ultra 4-bit", 0.1, 0.2, 64, 0.95),
    ],
)
def test_batches_come_near_the_best_length_once_a_file_was_decoded(
    name: str, alpha: float, draft: float, size: int, share: float
) -> None:
    texts = [6, 10, 12, 14, 20, 30, 12, 14] * (size // 2)
    machine = BatchMachine(CURVES[name], draft, alpha)
    first, *later = machine.auto(size, texts, 3, 3)
    best = machine.best_fixed(size, texts, 3)
    assert best / first > 0.75
    assert all(best / took > share for took in later)
