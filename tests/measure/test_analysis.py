"""Figures from samples with known answers."""

import random

import pytest

from mlx_specdec.measure.analysis import analyse
from mlx_specdec.measure.figures import FEWEST, Paired, speed_up
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


def test_all_texts_together_weigh_by_time_and_the_median_text_does_not() -> None:
    texts = [
        Paired(1.0, 1.0, 10, 10),
        Paired(1.0, 1.0, 10, 10),
        Paired(8.0, 2.0, 80, 80),
    ]
    found = speed_up(texts)
    assert found is not None
    assert found.overall.value == pytest.approx(10 / 4)
    assert found.per_text.value == pytest.approx(1.0)


def test_tokens_count_where_texts_differ_in_length() -> None:
    # Plain: 10 tokens in 1 s. The other: 40 in 2 s, twice as fast.
    found = speed_up([Paired(1.0, 2.0, 10, 40)])
    assert found is not None
    assert found.overall.value == found.per_text.value == pytest.approx(2.0)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    draw = random.Random(7)
    hits, trials = 0, 200
    for trial in range(trials):
        texts = []
        for _ in range(30):
            plain = draw.uniform(0.9, 1.1)
            texts.append(Paired(plain, plain / 1.5 * draw.lognormvariate(0, 0.2), 10, 10))
        found = speed_up(texts, draws=300, seed=trial)
        assert found is not None
        # The median of the factor is 1.
        hits += found.per_text.low <= 1.5 <= found.per_text.high
    assert 0.88 * trials <= hits <= trials


def test_fewer_than_five_sequences_have_no_interval() -> None:
    texts = [Paired(1.0, 0.5, 10, 10)] * FEWEST
    few, enough = speed_up(texts[1:]), speed_up(texts)
    assert few is not None and enough is not None
    assert (few.overall.low, few.per_text.high) == (None, None)
    assert enough.overall.low is not None and enough.overall.value == pytest.approx(
        few.overall.value
    )
