"""A change smaller than the margin never changes the choice, and a cut that is near is seen."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.decoding.margins import cut_margin
from mlx_specdec.interfaces.rounds import Cut
from mlx_specdec.sampling.choices import margin
from mlx_specdec.sampling.distribution import apply_filters
from mlx_specdec.sampling.settings import Sampling

EDGE = 1e-6
FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.3},
    {"min_p": 0.999},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 4, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


def margins(before: np.ndarray, gumbel: np.ndarray, settings: Sampling) -> np.ndarray:
    """Of rows (n, vocabulary): what decides between their choice and another one."""
    rows, noise = mx.array(before)[None], mx.array(gumbel)[None]
    scored = apply_filters(rows, settings) + noise
    cut = cut_margin(scored, Cut(rows, noise, settings.top_k, settings.top_p, settings.min_p))
    return np.minimum(np.array(cut)[0], np.array(margin(scored))[0])


def choices(before: np.ndarray, gumbel: np.ndarray, settings: Sampling) -> np.ndarray:
    """The tokens that rows (n, vocabulary) choose."""
    kept = apply_filters(mx.array(before), settings)
    return np.array(mx.argmax(kept + mx.array(gumbel), axis=-1))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_no_change_below_the_margin_changes_the_choice(filters: dict) -> None:
    settings = Sampling(temperature=1.0, **filters)
    random = np.random.default_rng(1)
    before = (1.5 * random.normal(size=(400, 12))).astype(np.float32)
    gumbel = random.gumbel(size=before.shape).astype(np.float32)
    most = margins(before, gumbel, settings)
    chosen = choices(before, gumbel, settings)
    assert np.isfinite(most).all() and (most >= 0).all()
    closest = np.full(len(before), np.inf)
    for turn in range(300):
        # Differences between two entries change by twice what one entry does.
        size = random.choice([0.499, 0.6, 1.0]) * np.minimum(most, 5.0)[:, None]
        signs = random.choice([-1, 1], size=before.shape)
        parts = 1.0 if turn % 2 else random.uniform(size=before.shape)
        shifted = (before + size * signs * parts).astype(np.float32)
        other = choices(shifted, gumbel, settings) != chosen
        change = 2 * np.abs(shifted - before).max(axis=1)
        closest = np.where(other, np.minimum(closest, change), closest)
    assert (closest >= most - 1e-5).all()
    # And it is not less than it has to be: for nearly all, chance finds a change of twice it.
    assert (closest <= 2.1 * most).mean() > 0.9


def on_the_edge(filters: dict, kept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits and noise whose third token is just kept, or just dropped, and would be chosen."""
    step = EDGE if kept else -EDGE
    logits = np.array([3.0, 2.0, 1.0, 0.0, -1.0])
    if "top_k" in filters:
        logits[3] = logits[2] - step
        if filters["top_k"] == 2:
            logits[3], logits[1] = -1.0, logits[2] - step
    elif "min_p" in filters:
        logits[2] = logits[0] + math.log(filters["min_p"]) + step
    return logits.astype(np.float32), np.array([0, 0, 9, 0, 0], dtype=np.float32)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"min_p": 0.25}, {"top_p": None}], ids=str)
def test_a_cut_that_is_near_makes_a_small_margin(filters: dict, kept: bool) -> None:
    before, gumbel = on_the_edge(filters, kept)
    if "top_p" in filters:
        mass = np.exp(before.astype(np.float64))
        above = mass[:2].sum() / mass.sum()
        filters = {"top_p": above + (EDGE if kept else -EDGE)}
    settings = Sampling(temperature=1.0, **filters)
    rows, noise = mx.array(before)[None, None], mx.array(gumbel)[None, None]
    scored = apply_filters(rows, settings) + noise
    assert (mx.argmax(scored).item() == 2) is kept
    assert margin(scored).item() > 0.5
    assert (
        cut_margin(scored, Cut(rows, noise, settings.top_k, settings.top_p, settings.min_p)).item()
        < 2e-5
    )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_where_nothing_is_cut_that_would_be_chosen_the_lead_alone_counts(filters: dict) -> None:
    before = np.array([[9.0, 1.0, 0.5, 0.2, 0.1, 0.0, -1.0, -2.0, -3.0]], dtype=np.float32)
    settings = Sampling(temperature=1.0, **filters)
    lead = before[0, 0] - before[0, 1]
    assert margins(before, np.zeros_like(before), settings)[0] <= lead
    assert margins(before, np.zeros_like(before), settings)[0] > 2.5


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_banned_tokens_never_come_in(filters: dict) -> None:
    before = np.array([[1.0, -np.inf, 0.0, -np.inf]], dtype=np.float32)
    gumbel = np.array([[0.0, 50.0, 0.0, 50.0]], dtype=np.float32)
    settings = Sampling(temperature=1.0, **filters)
    assert margins(before, gumbel, settings)[0] == pytest.approx(1.0)
