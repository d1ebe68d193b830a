"""Figures from samples with known answers."""

from __future__ import annotations

import pytest

from mlx_specdec.measure.analysis import analyse
from mlx_specdec.measure.passes import PassCosts
from mlx_specdec.measure.prediction import expected_rounds

from ..support.bench_samples import measured, method, sample

PLAIN = method("plain", "plain", 0)
DRAFT = method("draft 3", "draft", 3)


def test_figures_of_one_method() -> None:
    rounds = [(3, 3), (3, 2), (3, 2)]
    found = measured(
        {
            "plain": [sample(1.0), sample(2.0)],
            "draft 3": [sample(0.5, rounds), sample(0.5, rounds)],
        },
        [PLAIN, DRAFT],
        ["a", "b"],
        parts={"draft 3": [sample(0.6, rounds, draft=0.06, verify=0.11)]},
    )
    analysis = analyse(found, PassCosts(0.015, {1: 0.15, 2: 0.2, 4: 0.3}, start=0.015))
    assert analysis is not None
    plain, draft = analysis.methods
    assert analysis.plain_step == pytest.approx(0.15)
    assert plain.speed_up is not None and plain.speed_up.overall.value == pytest.approx(1.0)
    assert draft.speed_up is not None and draft.speed_up.overall.value == pytest.approx(3.0)
    assert draft.speed_up.per_text.value == pytest.approx(3.0)
    assert {name: ratio.overall.value for name, ratio in draft.by_category.items()} == (
        pytest.approx({"a": 2.0, "b": 4.0})
    )
    assert draft.tokens_per_second == pytest.approx(20.0)
    assert draft.tokens_per_round == pytest.approx(10 / 3)
    assert draft.acceptance_rate == pytest.approx(7 / 9)
    assert draft.acceptance == pytest.approx((1, 1, 1 / 3))
    assert draft.parts is not None
    assert (draft.parts.draft, draft.parts.verify) == pytest.approx((0.06, 0.11))
    assert draft.parts.other == pytest.approx(0.03)
    # Plain steps of 0.15 s: c = 0.1, V(4) = 2, o = 0.2 in the loop and 0.1 at a round's start. The
    # first two drafted tokens always stay, so a text of ten tokens takes R(10) rounds.
    rounds = expected_rounds([1, 1, 1 / 3], 10)[10]
    assert draft.predicted == pytest.approx(10 / rounds / (0.3 + 2 + 0.2 + 0.1))
    assert analysis.predictions["draft"][2] == draft.predicted


def test_a_text_that_differs_is_reported_with_its_place_and_margin() -> None:
    same = sample(1.0, tokens=(5, 6, 7))
    found = measured(
        {
            "plain": [same, same, same],
            "draft 3": [same, sample(1.0, tokens=(5, 8, 7)), sample(1.0, tokens=(5, 6))],
        },
        [PLAIN, DRAFT],
        [None] * 3,
    )
    analysis = analyse(found, None)
    assert analysis is not None
    figures = analysis.methods[1]
    assert figures.compared == 3
    assert [(one.prompt, one.position) for one in figures.differences] == [(1, 1), (2, 2)]
    assert figures.predicted is None and analysis.predictions == {}


def test_a_method_that_promises_only_the_law_is_not_compared() -> None:
    found = measured(
        {"plain": [sample(1.0)], "draft 3": [sample(1.0, tokens=(9,))]},
        [PLAIN, method("draft 3", "draft", 3, same_text=False)],
        [None],
    )
    analysis = analyse(found, None)
    assert analysis is not None
    assert (analysis.methods[1].compared, analysis.methods[1].differences) == (0, ())


def test_one_stalled_repeat_of_three_does_not_move_the_figure() -> None:
    found = measured({"plain": [], "draft 3": []}, [PLAIN, DRAFT], [None])
    for repeat, seconds in enumerate((0.5, 60.0, 0.5)):
        found.samples["plain"][0, repeat] = sample(1.0)
        found.samples["draft 3"][0, repeat] = sample(seconds)
    found.samples["plain"][0, 3] = sample(100.0)  # the other one was interrupted
    analysis = analyse(found, None)
    assert analysis is not None
    speed_up = analysis.methods[1].speed_up
    assert speed_up is not None and speed_up.overall.value == pytest.approx(2.0)


def test_an_interrupted_measurement_uses_what_both_have() -> None:
    found = measured(
        {"plain": [sample(1.0), sample(9.0)], "draft 3": [sample(0.5)]}, [PLAIN, DRAFT], [None] * 2
    )
    found.interrupted = True
    analysis = analyse(found, None)
    assert analysis is not None and analysis.interrupted
    speed_up = analysis.methods[1].speed_up
    assert speed_up is not None and speed_up.overall.value == pytest.approx(2.0)
    assert analysis.methods[1].texts == 1
