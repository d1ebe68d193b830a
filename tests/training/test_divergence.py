"""Divergences: their values, their gradients, and what is told of held-out rows."""

from __future__ import annotations

from typing import get_args, get_type_hints

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.training.config import DistillConfig
from mlx_specdec.training.draft import DIVERGENCES, log_probabilities

NAMES = tuple(DIVERGENCES)

ROWS, SIZE = 3, 7


def logits(seed: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, SIZE))


def distribution(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def expected(kind: str, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    p, q = distribution(target), distribution(draft)

    def relative(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return (first * np.log(first / second)).sum(axis=-1)

    middle = (p + q) / 2
    return {
        "forward": relative(p, q),
        "reverse": relative(q, p),
        "jsd": (relative(p, middle) + relative(q, middle)) / 2,
        "tvd": 1 - np.minimum(p, q).sum(axis=-1),
    }[kind]


def measured(kind: str, target: np.ndarray, draft: mx.array) -> mx.array:
    return DIVERGENCES[kind](log_probabilities(mx.array(target)), log_probabilities(draft))


def test_every_name_has_a_divergence() -> None:
    assert get_args(get_type_hints(DistillConfig)["divergence"]) == NAMES


@pytest.mark.parametrize("kind", NAMES)
def test_values_are_those_of_the_formulas(kind: str) -> None:
    found = measured(kind, logits(0), mx.array(logits(1)))
    np.testing.assert_allclose(np.array(found), expected(kind, logits(0), logits(1)), atol=1e-5)
    same = measured(kind, logits(0), mx.array(logits(0)))
    np.testing.assert_allclose(np.array(same), np.zeros(ROWS), atol=1e-6)


@pytest.mark.parametrize("kind", NAMES)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    target, draft, step = logits(2), logits(3), 1e-5
    found = np.array(mx.grad(lambda q: measured(kind, target, q).sum())(mx.array(draft)))
    for place in np.ndindex(draft.shape):
        moved = np.zeros_like(draft)
        moved[place] = step
        up, down = (expected(kind, target, draft + sign * moved).sum() for sign in (1, -1))
        assert found[place] == pytest.approx((up - down) / (2 * step), abs=2e-4)


@pytest.mark.parametrize("kind", NAMES)
def test_tokens_without_any_probability_do_no_harm(kind: str) -> None:
    target, draft = logits(4), logits(5)
    target[:, 0] = draft[:, 1] = -np.inf
    value, gradient = mx.value_and_grad(lambda q: measured(kind, target, q).sum())(mx.array(draft))
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
