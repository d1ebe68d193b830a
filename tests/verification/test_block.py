"""Block and token rule by enumeration: the joint law of what is emitted is the target's, exactly.

Toy models of three symbols whose conditionals depend on the whole prefix. Every draft, every way to
accept it and every correction is summed, in float64, with the functions that `judge` compares its
uniforms with.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import NO_TOKEN, Proposal
from mlx_specdec.sampling.noise import IndependentNoise
from mlx_specdec.verification import rules
from mlx_specdec.verification.rules import BlockRule

from ..support.block_enumeration import (
    SYMBOLS,
    Kept,
    block_lengths,
    distance,
    joint,
    token_lengths,
    toy,
)
from ..support.mocks import Given


@pytest.mark.parametrize("rule", [token_lengths, block_lengths])
@pytest.mark.parametrize(("n", "tokens"), [(1, 3), (2, 3), (3, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_joint_law_over_several_rounds_is_the_targets(
    rule: Kept, n: int, tokens: int, seed: int
) -> None:
    target, draft = toy(seed), toy(seed + 100)
    law, _ = joint(target, draft, rule, n, tokens)
    assert distance(target, law, tokens) < 1e-9


def filled_up(rule: Kept) -> Kept:
    """The rule on a rectangle that is wider than the drafts, as `Proposal.for_rules` hands it."""

    def verified(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, n = x.shape
        junk = np.random.default_rng(n).dirichlet(np.ones(SYMBOLS), (count, 2))
        lengths, after = rule(
            np.concatenate([p, junk], axis=1),
            np.concatenate([q, np.zeros((count, 2, SYMBOLS))], axis=1),
            np.concatenate([x, np.full((count, 2), NO_TOKEN)], axis=1),
        )
        assert (lengths[:, n + 1 :] == 0).all()
        return lengths[:, : n + 1], after[:, : n + 1]

    return verified


@pytest.mark.parametrize("rule", [token_lengths, block_lengths])
@pytest.mark.parametrize(("n", "tokens"), [(1, 3), (2, 3)])
def test_what_fills_up_a_rectangle_changes_neither_law_nor_acceptance(
    rule: Kept, n: int, tokens: int
) -> None:
    for seed in range(3):
        target, draft = toy(seed), toy(seed + 100)
        law, accepted = joint(target, draft, filled_up(rule), n, tokens)
        assert distance(target, law, tokens) < 1e-9
        assert accepted == pytest.approx(joint(target, draft, rule, n, tokens)[1], abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_block_rule_keeps_at_least_as_many(seed: int) -> None:
    target, draft = toy(seed), toy(seed + 100, sharpness=3.0)
    _, by_token = joint(target, draft, token_lengths, 3, 1)
    _, by_block = joint(target, draft, block_lengths, 3, 1)
    assert by_block >= by_token - 1e-12


def test_judge_compares_each_uniform_with_its_probability_and_takes_the_longest() -> None:
    generator = np.random.default_rng(2)
    p = generator.dirichlet(np.ones(SYMBOLS), 3).astype(np.float32)
    q = generator.dirichlet(np.ones(SYMBOLS), 2).astype(np.float32)
    for x in itertools.product(range(SYMBOLS), repeat=2):
        tokens = mx.array([x], dtype=mx.int32)
        probabilities = mx.array(p[None, :2]), mx.array(q[None])
        ratios = rules.joint_ratios(*probabilities, tokens)
        h = rules.block_accept_probabilities(*probabilities, ratios)[0].tolist()
        for below in itertools.product([True, False], repeat=2):
            uniforms = [
                value - 1e-4 if yes else value + 1e-4 for value, yes in zip(h, below, strict=True)
            ]
            proposal = Proposal(tokens, mx.log(mx.array(q[None])))
            verdict = BlockRule().verify(mx.log(mx.array(p[None])), proposal, Given(uniforms))
            expected = 2 if below[1] else 1 if below[0] else 0
            assert int(mx.sum(verdict.accepted).item()) == expected
            assert verdict.accepted.tolist() == [[index < expected for index in range(2)]]


def test_for_one_hot_proposals_block_and_token_accept_alike() -> None:
    source = IndependentNoise(3, SYMBOLS)
    law = mx.random.normal((1, 4, SYMBOLS), key=mx.random.key(1))
    p = mx.softmax(law, axis=-1)
    for x in itertools.product(range(SYMBOLS), repeat=3):
        proposal = Proposal(mx.array([x], dtype=mx.int32))
        q = rules.draft_probabilities(proposal, SYMBOLS)
        by_token = rules.accept_probabilities(p[:, :3], q, proposal.tokens)[0].tolist()
        ratios = rules.joint_ratios(p[:, :3], q, proposal.tokens)[0].tolist()
        np.testing.assert_allclose(ratios, np.cumprod([1.0, *by_token]), rtol=1e-5)
        verdict = BlockRule().verify(law, proposal, source.at(0, 0))
        assert verdict.accepted.shape == (1, 3)
