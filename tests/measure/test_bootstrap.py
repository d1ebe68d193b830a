"""Speed-ups and their intervals: exact on exact data, paired, about as wide as they should be."""

from __future__ import annotations

import random

import pytest

from mlx_specdec.measure.figures import FEWEST, Paired, speed_up


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
