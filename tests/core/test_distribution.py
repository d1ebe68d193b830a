"""The distribution of a position: our filters and penalties against mlx-lm's, row by row."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_specdec.core.distribution import (
    Distribution,
    apply_penalties,
    exclude_top_choices,
    keep_min_p,
    keep_top_k,
    keep_top_k_and_p,
    keep_top_p,
)
from mlx_specdec.core.options import Options

from ..support.nothing import NO_DRAFT

VOCABULARY = 40
ROUNDING = 1e-3
"""Rounding error of a sum of many thousand probabilities in float32."""


def random_logits(seed: int, rows: int = 6) -> mx.array:
    return 3 * mx.random.normal((rows, VOCABULARY), key=mx.random.key(seed))


def normalized(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def kept(logits: mx.array) -> list[list[bool]]:
    return (logits > -mx.inf).tolist()


def apply_xtc(row: mx.array, *settings: Any) -> mx.array:
    return sample_utils.apply_xtc(row, 1.0, *settings)


SPECIAL = ([], [0, 7, 39], list(range(VOCABULARY)))
FILTERS = [
    *((keep_top_k, sample_utils.apply_top_k, (k,)) for k in (1, 3, VOCABULARY - 1)),
    *((keep_top_p, sample_utils.apply_top_p, (p,)) for p in (0.1, 0.5, 0.9, 0.99)),
    *((keep_min_p, sample_utils.apply_min_p, (p,)) for p in (0.01, 0.1, 0.5, 0.99)),
    *(
        (exclude_top_choices, apply_xtc, settings)
        for settings in itertools.product((0.0, 0.02, 0.1, 0.3, 0.5), SPECIAL)
    ),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("filtered", "reference", "settings"), FILTERS)
def test_filters_keep_what_mlx_lm_keeps(
    seed: int, filtered: Any, reference: Any, settings: tuple[Any, ...]
) -> None:
    logits = random_logits(seed)
    for row in normalized(keep_top_p(logits, 0.95) if reference is apply_xtc else logits):
        expected = reference(row[None], *settings)
        assert kept(filtered(row[None], *settings)) == kept(expected)


def shares(law: mx.array) -> np.ndarray:
    exact = np.exp(np.array(law, dtype=np.float64))
    return exact / exact.sum()


SHARES = (1e-6, 0.3, 0.5, 0.9, 0.99, 0.9999)


@pytest.mark.parametrize(
    ("spread", "width", "p"),
    [  # each share with each spread and with each width
        (spread, width, p)
        for first, spread in enumerate((0.0, 0.3, 2.0, 8.0))
        for second, width in enumerate((1, 2, 50, 1 << 14))
        for p in SHARES[(first + second) % 3 :: 3]
    ],
)
def test_top_p_keeps_what_a_sum_in_order_keeps(spread: float, width: int, p: float) -> None:
    key = mx.random.key(width)
    random = spread * mx.random.normal((4, width), key=key)
    banned = mx.where(mx.random.uniform(shape=(4, width), key=key) < 0.3, -mx.inf, random)
    banned[:, 0] = 1.0
    powers = mx.round(random).astype(mx.bfloat16).astype(mx.float32) * math.log(2)
    for law in (random, mx.round(random), banned, powers):
        for row, filtered in zip(law, keep_top_p(law, p), strict=True):
            share = shares(row)
            order = np.argsort(-np.array(row), kind="stable")
            before = np.cumsum(share[order]) - share[order]
            wanted = np.zeros(width, dtype=bool)
            wanted[order] = before < p
            mine = np.array(filtered) > -np.inf
            # A sum in float32 reaches p a little sooner or later, and so may drop or keep a token.
            differ = order[mine[order] != wanted[order]]
            assert np.abs(before[np.argsort(order)][differ] - p).max(initial=0) < ROUNDING
            # Of equally likely ones the first stay.
            assert not np.any(np.diff(mine[order].astype(int)) > 0) and mine[order[0]]


def test_top_choices_are_excluded_where_the_coins_say_so_in_a_block_as_token_by_token() -> None:
    settings = Options(temperature=1, xtc_probability=0.5, xtc_threshold=0.02, seed=9)
    prompt, block = [5, 6, 6], [7, 7, 5, 9, 8, 8, 1]
    logits = random_logits(6, rows=8)[None]
    at_once = Distribution(settings, VOCABULARY, prompt).log_probabilities(
        logits, prompt, mx.array([block])
    )
    single, excluded = Distribution(settings, VOCABULARY, prompt), []
    for index in range(8):
        text = prompt + block[:index]
        row = single.log_probabilities(logits[:, index : index + 1], text, NO_DRAFT)
        assert mx.array_equal(row[0, 0], at_once[0, index])
        excluded.append(not mx.array_equal(row, logits[:, index : index + 1]))
    assert set(excluded) == {True, False}
    cold = Options(xtc_probability=1, xtc_threshold=0)
    law = Distribution(cold, VOCABULARY, prompt)
    greedy = law.log_probabilities(logits, prompt + block, NO_DRAFT)
    assert mx.array_equal(greedy, logits), "filters are for drawing"


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"repetition_penalty": 0.5}, sample_utils.make_repetition_penalty),
        ({"repetition_penalty": 1.3}, sample_utils.make_repetition_penalty),
        ({"presence_penalty": 0.7}, sample_utils.make_presence_penalty),
        ({"frequency_penalty": 0.7}, sample_utils.make_frequency_penalty),
    ],
)
def test_penalties_equal_mlx_lms(settings: dict[str, float], make: Any) -> None:
    logits, tokens = random_logits(1), [3, 3, 7, 11]
    expected = make(*settings.values(), len(tokens))(mx.array(tokens), mx.array(logits))
    found = penalised(logits, tokens, Options(**settings))
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-6)


def penalised(logits: mx.array, tokens: list[int], settings: Options) -> mx.array:
    counts = mx.zeros((VOCABULARY,)).at[mx.array(tokens)].add(1.0)
    return apply_penalties(logits, counts, settings, mx.zeros((VOCABULARY,), dtype=mx.bool_))


@pytest.mark.parametrize(
    "settings",
    [
        Options(repetition_penalty=1.5),
        Options(temperature=1, presence_penalty=1.0, frequency_penalty=0.5),
        Options(temperature=0.8, repetition_penalty=1.2, top_p=0.9),
    ],
)
def test_penalties_inside_a_block_advance_as_token_by_token(settings: Options) -> None:
    prompt, block = [5, 6, 6], [7, 7, 5, 9]
    logits = random_logits(6, rows=5)[None]
    at_once = Distribution(settings, VOCABULARY).log_probabilities(
        logits, prompt, mx.array([block])
    )
    single = Distribution(settings, VOCABULARY)
    for index in range(5):
        text = prompt + block[:index]
        row = single.log_probabilities(logits[:, index : index + 1], text, NO_DRAFT)
        np.testing.assert_allclose(np.array(row[0, 0]), np.array(at_once[0, index]), atol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 5, 40, 64, 99])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_top_k_and_top_p_together_keep_what_one_after_the_other_keeps(k: int, p: float) -> None:
    rows = 3 * mx.random.normal((2, 3, 64), key=mx.random.key(k))
    expected = keep_top_p(keep_top_k(rows, k), p)
    assert mx.array_equal(keep_top_k_and_p(rows, k, p), expected)
