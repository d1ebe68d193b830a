"""Figures from samples with known answers."""

import pytest

from mlx_specdec.measure.figures import analyse

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
    )
    analysis = analyse(found)
    assert analysis is not None
    plain, draft = analysis.methods
    assert (plain.speed_up, draft.speed_up) == pytest.approx((1.0, 3.0))
    assert draft.spread == pytest.approx((3.0, 3.0))
    assert draft.by_category == pytest.approx({"a": 2.0, "b": 4.0})
    assert draft.tokens_per_second == pytest.approx(20.0)
    assert draft.tokens_per_round == pytest.approx(10 / 3)
    assert draft.acceptance_rate == pytest.approx(7 / 9)
    assert draft.acceptance == pytest.approx((1, 1, 1 / 3))


def test_a_text_that_differs_is_reported_with_its_place() -> None:
    same = sample(1.0, tokens=(5, 6, 7))
    found = measured(
        {
            "plain": [same, same, same],
            "draft 3": [same, sample(1.0, tokens=(5, 8, 7)), sample(1.0, tokens=(5, 6))],
        },
        [PLAIN, DRAFT],
        [None] * 3,
    )
    analysis = analyse(found)
    assert analysis is not None
    figures = analysis.methods[1]
    assert figures.compared == 3
    assert [(one.prompt, one.position) for one in figures.differences] == [(1, 1), (2, 2)]


def test_one_stalled_repeat_of_three_does_not_move_the_figure() -> None:
    found = measured({"plain": [], "draft 3": []}, [PLAIN, DRAFT], [None])
    for repeat, seconds in enumerate((0.5, 60.0, 0.5)):
        found.samples["plain"][0, repeat] = sample(1.0)
        found.samples["draft 3"][0, repeat] = sample(seconds)
    found.samples["plain"][0, 3] = sample(100.0)  # the other one was interrupted
    analysis = analyse(found)
    assert analysis is not None
    assert analysis.methods[1].speed_up == pytest.approx(2.0)


def test_all_texts_together_weigh_by_time() -> None:
    seconds = {"plain": (1.0, 8.0), "draft 3": (1.0, 2.0)}
    found = measured(
        {
            name: [sample(short), sample(long, ((0, 0),) * 80)]
            for name, (short, long) in seconds.items()
        },
        [PLAIN, DRAFT],
        [None] * 2,
    )
    analysis = analyse(found)
    assert analysis is not None and analysis.methods[1].speed_up == pytest.approx(9 / 3)
