"""A draft length whose drafts may end sooner than asked: what it tells them, and what it learns."""

from __future__ import annotations

import pytest

from mlx_specdec.decoding.auto_length import AutoLength

from .mocks import a_round


def learned(*, stops: bool, rounds: int = 120) -> AutoLength:
    """Of every round one token is verified, and stays; more was asked for."""
    lengths = AutoLength(most=4, stops=stops)
    for _ in range(rounds):
        asked = lengths.choose(10_000)
        drafted = min(asked, 1)
        lengths.on_round(a_round(drafted, drafted, 1.0 + 0.1 * drafted))
    return lengths


def test_a_token_at_which_a_draft_ends_counts_as_one_that_would_not_have_stayed() -> None:
    _, passed = learned(stops=True).experience.verdicts
    reached, _ = learned(stops=True).experience.verdicts
    assert reached[1] > 0 and passed[1] == 0
    reached, _ = learned(stops=False).experience.verdicts
    assert reached[1] == 0


def test_prices_are_told_once_they_are_known_and_not_in_trials() -> None:
    lengths = AutoLength(most=4, stops=True)
    assert lengths.prices() is None
    told = []
    for _ in range(200):
        asked = lengths.choose(10_000)
        prices = lengths.prices()
        assert prices is None or not lengths._trying
        if prices is not None:
            told.append(prices)
        lengths.on_round(a_round(asked, min(asked, 3), 1.0 + 0.1 * asked))
    assert len(told) > 50
    assert told[-1].rounds[3] - told[-1].rounds[2] == pytest.approx(0.1, rel=0.3)
    # Four tokens for the price of a round of three or four.
    assert 0.2 < told[-1].token < 0.5
