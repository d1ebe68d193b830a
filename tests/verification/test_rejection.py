"""The token rule: its emitted law is p exactly, shown by enumeration in float32 and by draws."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.interfaces import Proposal
from mlx_specdec.sampling.noise import IndependentNoise, noise_of
from mlx_specdec.verification.rules import (
    TokenRule,
    accept_probabilities,
    correction,
    draft_probabilities,
)

from ..support.mocks import Given


def law_of(*weights: float) -> np.ndarray:
    values = np.array(weights, dtype=np.float64)
    return values / values.sum()


def emitted_law(p: np.ndarray, q: np.ndarray, delta: float = 0.0) -> np.ndarray:
    """The exact law of the first emitted token, summed over everything that may be drafted."""
    result = np.zeros_like(p)
    rejected = 0.0
    for token in np.flatnonzero(q):
        accept = accept_probabilities(
            mx.array(p[None, None]), mx.array(q[None, None]), mx.array([[int(token)]]), delta
        )
        share = q[token] * float(accept.item())
        result[token] += share
        rejected += q[token] - share
    return result + rejected * np.array(correction(mx.array(p), mx.array(q)), dtype=np.float64)


weights = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 1.0)), min_size=4, max_size=4).filter(
    lambda values: sum(values) > 0
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights, weights)
def test_the_emitted_law_is_the_targets(p_weights: list[float], q_weights: list[float]) -> None:
    p, q = law_of(*p_weights), law_of(*q_weights)
    np.testing.assert_allclose(emitted_law(p, q), p, atol=2e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights, weights, st.floats(0, 1))
def test_lenience_moves_the_law_by_at_most_delta(
    p_weights: list[float], q_weights: list[float], delta: float
) -> None:
    p, q = law_of(*p_weights), law_of(*q_weights)
    distance = np.abs(emitted_law(p, q, delta) - p).sum() / 2
    assert distance <= delta + 1e-5


def test_equal_laws_accept_everything_and_the_empty_residual_falls_back_to_p() -> None:
    p = mx.array([[[0.2, 0.3, 0.5]]])
    assert accept_probabilities(p, p, mx.array([[1]])).item() == 1
    assert mx.array_equal(correction(p, p), p)


def test_a_proposal_without_rows_is_taken_as_one_hot() -> None:
    p = mx.array([[[0.2, 0.3, 0.5]]])
    q = draft_probabilities(Proposal.one_hot([[2]]), 3)
    assert accept_probabilities(p, q, mx.array([[2]])).item() == 0.5
    np.testing.assert_allclose(np.array(correction(p, q)), [[[0.4, 0.6, 0.0]]], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("with_rows", [True, False])
def test_draws_of_the_whole_rule_follow_the_target(with_rows: bool) -> None:
    """2,000 rounds from real keys: the first emitted token's law, within four deviations."""
    p, q = law_of(5, 2, 2, 1), law_of(1, 4, 1, 2)
    source, samples = IndependentNoise(seed=1, vocabulary=4), 2000
    noise = noise_of([source.at(index, 0) for index in range(samples)])
    law = mx.log(mx.array(np.tile(p, (samples, 2, 1)).astype(np.float32)))
    row = mx.log(mx.array(np.tile(q, (samples, 1, 1)).astype(np.float32)))
    if with_rows:
        proposal = Proposal(mx.argmax(row + noise.draft(0), axis=-1).astype(mx.int32), row)
    else:
        proposal = Proposal((mx.arange(samples, dtype=mx.int32) % 4)[:, None])
    verdict = TokenRule().verify(law, proposal, noise)
    chosen = mx.where(verdict.accepted[:, 0], proposal.tokens[:, 0], verdict.next)
    counts = np.bincount(np.array(chosen), minlength=4)
    bound = 4 * np.sqrt(p * (1 - p) / samples)
    assert (np.abs(counts / samples - p) < bound).all()


@pytest.mark.parametrize("delta", [0.0, 0.2])
def test_judge_accepts_just_below_each_threshold_and_not_just_above(delta: float) -> None:
    generator = np.random.default_rng(5)
    p = generator.dirichlet(np.ones(4), 3).astype(np.float32)
    q = generator.dirichlet(np.ones(4), 2).astype(np.float32)
    rows, draft_rows = mx.array(p[None]), mx.array(q[None])
    after = np.array(correction(rows[:, :2], draft_rows))[0]
    for x in itertools.product(range(4), repeat=2):
        tokens = mx.array([x], dtype=mx.int32)
        limits = accept_probabilities(rows[:, :2], draft_rows, tokens, delta)[0].tolist()
        for below in itertools.product([True, False], repeat=2):
            uniforms = [
                limit - 1e-4 if yes else limit + 1e-4
                for limit, yes in zip(limits, below, strict=True)
            ]
            proposal = Proposal(tokens, mx.log(draft_rows))
            verdict = TokenRule(delta).verify(mx.log(rows), proposal, Given(uniforms))
            count = 0 if not below[0] else 1 if not below[1] else 2
            assert int(mx.sum(verdict.accepted).item()) == count
            assert verdict.next.item() == np.argmax([*after, p[2]][count])


def test_more_lenience_never_accepts_less_and_all_of_it_accepts_everything() -> None:
    generator = np.random.default_rng(6)
    p, q = (mx.array(generator.dirichlet(np.ones(4), (50, 3)).astype(np.float32)) for _ in "pq")
    tokens = mx.array(generator.integers(0, 4, (50, 3)), dtype=mx.int32)
    before = mx.zeros((50, 3))
    for delta in (0.0, 0.1, 0.4, 0.8, 1.0):
        accept = accept_probabilities(p, q, tokens, delta)
        assert mx.all(accept >= before)
        before = accept
    assert mx.all(before == 1)
