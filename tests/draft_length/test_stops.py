"""A draft length whose drafts may end sooner than asked: what it tells them, and what it learns."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.draft_length.auto_length import AutoLength, Source
from mlx_specdec.draft_length.costs import ending_sooner
from mlx_specdec.proposers.hidden_state import Confidence

from ..support.draft_length_simulator import CURVES, a_round, hear, verify_cost

BLOCK, DRAFT, LOOK = 7, 0.15, 0.02
"""Tokens of a block; what drafting it, and reading how sure the drafter is, cost in plain steps."""


def learned(*, stops: bool, rounds: int = 120) -> AutoLength:
    """Of every round one token is verified, and stays; more was asked for."""
    lengths = AutoLength([Source(most=4, stops=stops)])
    for _ in range(rounds):
        queried = lengths.choose(10_000)
        drafted = min(queried, 1)
        hear(lengths, a_round(drafted, drafted, 1.0 + 0.1 * drafted))
    return lengths


def test_a_token_at_which_a_draft_ends_counts_as_one_that_would_not_have_stayed() -> None:
    reached, passed = learned(stops=True).knowledge["counts draft"]
    assert reached[1] > 0 and passed[1] == 0
    reached, _ = learned(stops=False).knowledge["counts draft"]
    assert reached[1] == 0


def test_a_draft_that_the_end_of_the_text_cut_says_nothing_of_the_next_token() -> None:
    drafts = a_round(1, 1, 1.1)
    last = replace(drafts, sequences=tuple(replace(each, ended=True) for each in drafts.sequences))
    counts = []
    for stops in (True, False):
        lengths = AutoLength([Source(most=4, stops=stops)], learned(stops=False).knowledge)
        assert lengths.choose(10_000) > 1
        hear(lengths, last)
        counts.append(lengths.knowledge["counts draft"].tolist())
    assert counts[0] == counts[1]


def test_prices_are_there_once_they_are_known_and_not_in_trials() -> None:
    lengths = AutoLength([Source(most=4, stops=True)])
    assert lengths.prices("") is None
    content = []
    for _ in range(200):
        queried = lengths.choose(10_000)
        prices = lengths.prices("")
        if prices is not None:
            content.append(prices)
        hear(lengths, a_round(queried, min(queried, 3), 1.0 + 0.1 * queried))
    assert len(content) > 50
    assert content[-1].rounds[3] - content[-1].rounds[2] == pytest.approx(0.1, rel=0.5)
    # Four tokens for the price of a round of three or four.
    assert 0.2 < content[-1].token < 0.5


def test_what_a_length_costs_is_what_its_rounds_cost_on_average() -> None:
    costs = np.array([1.0, 1.5, 2.5, 4.5])
    assert ending_sooner(costs, np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(costs)
    ends = ending_sooner(costs, np.array([1.0, 2.0, 2.5, 2.75]))
    assert ends == pytest.approx([1.0, 1.5, 2.0, 2.5])
    assert ending_sooner(costs[:2], np.array([1.0, 1.8])) == pytest.approx(costs[:2])


def speed(curve: str, law: tuple[float, float], *, stops: bool) -> float:
    """Tokens a plain step of 2,000 rounds in which the drafter knows each token's chance, drawn
    from Beta(*law)."""
    generator, confidence = np.random.default_rng(0), Confidence()
    lengths = AutoLength([Source(most=BLOCK, stops=stops)])
    seconds, tokens = 0.0, 0
    for _ in range(2000):
        queried = lengths.choose(10_000)
        chances = generator.beta(*law, queried)
        stay = int(np.cumprod(generator.random(queried) < chances).sum())
        size, looked = queried, 0.0
        prices = lengths.prices("") if stops and queried else None
        if prices is not None:
            size, looked = confidence.worth(mx.array(chances[None]), prices), LOOK
        accepted = min(stay, size)
        confidence.learn(accepted)
        cost = DRAFT + verify_cost(CURVES[curve], size + 1) + looked if queried else 1.0
        cost *= 1 + 0.03 * abs(generator.standard_normal())
        hear(lengths, a_round(size, accepted, cost))
        seconds, tokens = seconds + cost, tokens + accepted + 1
    return tokens / seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curve", "law", "least"),
    [
        ("M4 Pro 4-bit", (0.8, 0.2), 1.0),
        ("M5 Max 70B", (0.8, 0.2), 1.0),
        ("M5 Max 70B", (0.6, 0.4), 0.96),
        # Where all tokens are alike, where rows are free, and where no draft pays.
        ("M4 Pro 4-bit", (4.0, 1.0), 0.96),
        ("flat", (0.8, 0.2), 0.94),
        ("M3 Ultra 4-bit", (0.8, 0.2), 0.96),
    ],
)
def test_knowing_each_tokens_chance_gains_where_rows_are_dear_and_loses_nowhere(
    curve: str, law: tuple[float, float], least: float
) -> None:
    assert speed(curve, law, stops=True) >= least * speed(curve, law, stops=False)


def test_trials_of_drafts_that_may_end_sooner_are_paid_in_full() -> None:
    # Here no draft pays, and a trial of seven tokens takes five steps, whatever others take.
    assert speed("M3 Ultra 4-bit", (0.8, 0.2), stops=True) >= 0.95
