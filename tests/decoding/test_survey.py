"""The controller of a calibration: what it measures, and how sure it is."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mlx_specdec.draft_length.survey import Survey

from ..support.mocks import a_round


def surveyed(turns: int, factors: tuple[float, ...]) -> Survey:
    """Rounds of n tokens cost 1 + n / 10 times the next of these factors."""
    survey, noise = Survey(3), itertools.cycle(factors)
    while survey.turns < turns:
        count = survey.choose(1000)
        survey.on_round(a_round(count, 0, (1 + 0.1 * count) * next(noise)))
    return survey


def test_every_length_is_measured_in_plain_steps() -> None:
    survey = surveyed(8, (1.0,))
    assert survey.measured() == pytest.approx({1: 1.1, 2: 1.2, 3: 1.3})
    assert survey.noise == 0


@pytest.mark.parametrize(
    ("factors", "low", "high"),
    [((1.0, 1.02, 0.98), 0.0, 0.02), ((1.0, 0.5, 2.0, 3.0, 0.7, 1.6, 0.4), 0.15, 0.6)],
)
def test_noise_is_how_far_turns_lie_apart(
    factors: tuple[float, ...], low: float, high: float
) -> None:
    assert low < surveyed(8, factors).noise < high


def test_more_turns_make_a_noisy_machine_a_surer_one() -> None:
    dice = random.Random(0)
    factors = tuple(math.exp(dice.gauss(0, 0.2)) for _ in range(97))
    assert surveyed(12, factors).noise < surveyed(5, factors).noise
