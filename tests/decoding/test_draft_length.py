"""The controller alone and in the simulator: never far below plain, near the best fixed length."""

from __future__ import annotations

import pytest

from mlx_specdec.costs.cache import together
from mlx_specdec.costs.online import Acceptance, Verdicts
from mlx_specdec.decoding.draft_length import AutoLength, FixedLength
from mlx_specdec.errors import OptionError

from .mocks import a_round
from .simulator import CURVES, Machine, bimodal, constant, drifting, verify_cost

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
    for known in (None, {1: 1.01, 2: 1.02, 12: 1.1}):
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
    cheap = AutoLength({n: 1.0 + 0.01 * n for n in range(17)})
    assert cheap.choose(100) > 4
    dear = AutoLength({n: 1.0 + 1.5 * n for n in range(17)})
    assert dear.choose(100) <= 1
    assert AutoLength().choose(100) == 0


def test_known_costs_of_some_lengths_are_joined_by_lines() -> None:
    lengths = AutoLength({2: 1.2, 8: 1.8})
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
    measured = lengths.measured()
    assert measured
    assert all(cost == pytest.approx(1 + 0.3 * n, rel=0.01) for n, cost in measured.items())


def test_changes_say_what_was_promised() -> None:
    lengths = AutoLength({n: 1.0 + 0.1 * n for n in range(17)})
    first = lengths.changes[0]
    assert (first.round, first.length) == (0, lengths.choose(100))
    assert first.speed > 1.2


@pytest.mark.parametrize("seeds", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*CURVES][:2] + [pytest.param(name, marks=pytest.mark.slow) for name in [*CURVES][2:]]
)
def test_long_texts_come_near_the_best_length_and_never_far_below_plain(
    name: str, kind: str, seeds: int
) -> None:
    for draft in (0.02, 0.3):
        machine = Machine(CURVES[name], draft, KINDS[kind])
        known = dict(enumerate(machine.costs()))
        # Where the text changes, both have to meet the same stretches of it.
        after = 40 if kind[0] == "0" else 0
        best = machine.best_fixed(600, 2, after)[1]
        for make, share, plain in (
            (lambda: AutoLength(known), 0.85, 0.94),  # noqa: B023  used in this turn only
            (AutoLength, 0.75, 0.85),
        ):
            auto = machine.speed(make, 600, seeds, after)
            assert auto >= plain, (draft, auto)
            assert auto >= share * best, (draft, auto / best)


@pytest.mark.parametrize("seeds", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CURVES)
def test_short_texts_are_not_far_below_plain(name: str, seeds: int) -> None:
    for draft in (0.02, 0.3):
        for kind in KINDS.values():
            machine = Machine(CURVES[name], draft, kind)
            known = dict(enumerate(machine.costs()))
            assert machine.speed(lambda k=known: AutoLength(k), 100, seeds) >= 0.90
            assert machine.speed(AutoLength, 100, seeds) >= 0.80


@pytest.mark.parametrize("known", [{1: 1.3}, {4: 2.6}, {1: 1.3, 16: 6.0}])
def test_a_few_costs_of_earlier_texts_are_no_trap(known: dict[int, float]) -> None:
    # They are plain steps, what this text measures is seconds: the two must not be compared.
    curve = {1: 1.0, 2: 1.2, 16: 5.6}
    machine = Machine(curve, 0.1, constant(0.6))
    auto = machine.speed(lambda: AutoLength(known), 100, 12)
    assert auto > 0.9 * machine.best_fixed(100, 12)[1]

    quick, chosen = AutoLength(known), []
    for _ in range(60):
        chosen.append(quick.choose(1000))
        quick.on_round(a_round(chosen[-1], min(chosen[-1], 1), 0.004 * (1.0 + 0.3 * chosen[-1])))
    assert sum(count <= 2 for count in chosen) > 45


class Texts:
    """Texts one after the other, each of which begins with what the ones before it taught."""

    def __init__(self, machine: Machine, tokens: int, costs: dict[int, float]) -> None:
        self.machine, self.tokens, self.costs = machine, tokens, costs
        self.verdicts: Verdicts | None = None
        self.saved = 0.0
        self.seed = 0

    def run(self, count: int) -> float:
        """Tokens per plain step over so many texts."""
        clock, emitted = 0.0, 0
        for _ in range(count):
            acceptance = Acceptance(AutoLength.LONGEST_DRAFT, earlier=self.verdicts)
            lengths = AutoLength(self.costs, acceptance=acceptance, saved=self.saved)
            took, tokens = self.machine.time(lengths, self.tokens, self.seed)
            clock, emitted, self.seed = clock + took, emitted + tokens, self.seed + 1
            self.costs = together(self.costs, lengths.measured())
            self.verdicts, self.saved = lengths.verdicts, lengths.saved
        return emitted / clock


def costs_of(machine: Machine) -> dict[int, float]:
    return dict(enumerate(machine.costs()[1:], start=1))


@pytest.mark.parametrize("poison", [10.0, 100.0, 0.1])
def test_costs_that_are_wrong_mend_themselves_within_ten_texts(poison: float) -> None:
    machine = Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.8))
    wrong = {length: cost * poison for length, cost in costs_of(machine).items()}
    texts = Texts(machine, 12, wrong)
    texts.run(10)
    best = machine.best_fixed(12, 40)[1]
    assert texts.run(40) > 0.85 * best


@pytest.mark.parametrize("name", ["M3 Ultra bf16", "M4 Pro 4-bit", "flat", "linear"])
@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9])
def test_short_texts_that_follow_others_come_near_the_best(name: str, alpha: float) -> None:
    machine = Machine(CURVES[name], 0.15, constant(alpha))
    texts = Texts(machine, 12, costs_of(machine))
    texts.run(5)
    reached, best = texts.run(60), machine.best_fixed(12, 60)[1]
    assert reached > 0.84 * best


def test_a_text_that_behaves_otherwise_is_believed_soon() -> None:
    machine = Machine(CURVES["M4 Pro 4-bit"], 0.1, constant(0.05))
    always = ((1000.0,) * 16, (990.0,) * 16)
    acceptance = Acceptance(AutoLength.LONGEST_DRAFT, earlier=always)
    lengths = AutoLength(costs_of(machine), acceptance=acceptance, saved=0.0)
    machine.time(lengths, 60, 0)
    assert lengths.choose(100) <= 1
