"""Block and token rule by enumeration: the joint law of what is emitted is the target's, exactly.

Toy models of three symbols whose conditionals depend on the whole prefix. Every draft, every way to
accept it and every correction is summed, in float64, with the functions that `judge` compares its
uniforms with.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import NO_TOKEN, Proposal
from mlx_specdec.sampling.noise import IndependentNoise, SilentNoise
from mlx_specdec.verification import rules
from mlx_specdec.verification.rules import BlockRule, TokenRule, one_hot

SYMBOLS = 3
Model = Callable[[tuple[int, ...]], np.ndarray]
Kept = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Of p (drafts, n + 1, symbols), q (drafts, n, symbols) and the drafted tokens (drafts, n): the
chance of each length 0 .. n (drafts, n + 1), and the law of the token after it (as p)."""


def toy(seed: int, sharpness: float = 1.0) -> Model:
    """Conditionals that depend on everything before; some of them have zeros."""

    @functools.cache
    def conditional(prefix: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        weights = generator.gamma(sharpness, size=SYMBOLS)
        if generator.random() < 0.25:
            weights[generator.integers(SYMBOLS)] = 0.0
        return weights / weights.sum()

    return conditional


def in_float64(function, *arrays: np.ndarray) -> np.ndarray:
    with mx.stream(mx.cpu):
        converted = [
            mx.array(array, dtype=mx.int32 if array.dtype.kind == "i" else mx.float64)
            for array in arrays
        ]
        return np.array(function(*converted), dtype=np.float64)


def token_lengths(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths and laws of the token rule."""
    accept = in_float64(rules.accept_probabilities, p[:, :-1], q, x)
    one = np.ones((len(x), 1))
    going = np.hstack([one, np.cumprod(accept, axis=1)])
    after = in_float64(rules.correction, p[:, :-1], q)
    return going * np.hstack([1 - accept, one]), np.concatenate([after, p[:, -1:]], axis=1)


def block_lengths(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for the block rule: the longest success counts."""
    accept = in_float64(rules.block_accept_probabilities, p, q, x)
    one = np.ones((len(x), 1))
    later_fail = np.hstack([np.cumprod((1 - accept)[:, ::-1], axis=1)[:, ::-1], one])
    ratios = in_float64(rules.joint_ratios, p[:, :-1], q, x)
    after = in_float64(rules.correction, p[:, :-1], q, ratios[:, :-1])
    return np.hstack([one, accept]) * later_fail, np.concatenate([after, p[:, -1:]], axis=1)


def joint(target: Model, draft: Model, rule: Kept, n: int, tokens: int) -> tuple[dict, float]:
    """The joint law of the first `tokens` emitted symbols over as many rounds as that takes, and
    the mean number of accepted symbols of the first round."""
    result: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    waiting = {(): 1.0}
    drafts = list(itertools.product(range(SYMBOLS), repeat=n))
    while waiting:
        prefix, chance = waiting.popitem()
        if len(prefix) >= tokens:
            result[prefix[:tokens]] = result.get(prefix[:tokens], 0.0) + chance
            continue
        q = np.array([[draft(prefix + x[:i]) for i in range(n)] for x in drafts])
        p = np.array([[target(prefix + x[:i]) for i in range(n + 1)] for x in drafts])
        drawn = np.take_along_axis(q, np.array(drafts)[..., None], axis=2).prod(axis=(1, 2))
        possible = np.flatnonzero(drawn)
        rules = rule(p[possible], q[possible], np.array(drafts)[possible])
        for number, lengths, after in zip(possible, *rules, strict=True):
            x, drafted = drafts[number], chance * drawn[number]
            accepted += drafted * (lengths @ np.arange(n + 1)) if not prefix else 0.0
            for length, symbol in itertools.product(range(n + 1), range(SYMBOLS)):
                more = drafted * lengths[length] * after[length, symbol]
                if more > 0:
                    key = (*prefix, *x[:length], symbol)
                    waiting[key] = waiting.get(key, 0.0) + more
    return result, accepted


def distance(target: Model, law: dict, tokens: int) -> float:
    """Total variation from the target's own joint law."""
    total = 0.0
    for text in itertools.product(range(SYMBOLS), repeat=tokens):
        own = np.prod([target(text[:i])[text[i]] for i in range(tokens)])
        total += abs(own - law.get(text, 0.0))
    return total / 2


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


class Given:
    """Uniforms and Gumbel noise from outside."""

    def __init__(self, uniforms: list[float]) -> None:
        self._uniforms = mx.array([uniforms])

    def accept(self, count: int) -> mx.array:
        return self._uniforms[:, :count]

    def correction(self) -> None:
        return None


def test_judge_compares_each_uniform_with_its_probability_and_takes_the_longest() -> None:
    generator = np.random.default_rng(2)
    p = generator.dirichlet(np.ones(SYMBOLS), 3).astype(np.float32)
    q = generator.dirichlet(np.ones(SYMBOLS), 2).astype(np.float32)
    for x in itertools.product(range(SYMBOLS), repeat=2):
        tokens = mx.array([x], dtype=mx.int32)
        h = rules.block_accept_probabilities(mx.array(p[None]), mx.array(q[None]), tokens)[
            0
        ].tolist()
        for below in itertools.product([True, False], repeat=2):
            uniforms = [
                value - 1e-4 if yes else value + 1e-4 for value, yes in zip(h, below, strict=True)
            ]
            proposal = Proposal(tokens, mx.log(mx.array(q[None])))
            verdict = BlockRule().verify(mx.log(mx.array(p[None])), proposal, Given(uniforms))
            expected = 2 if below[1] else 1 if below[0] else 0
            assert int(mx.sum(verdict.kept).item()) == expected
            assert verdict.kept.tolist() == [[index < expected for index in range(2)]]


def test_for_one_hot_proposals_block_and_token_accept_alike() -> None:
    source = IndependentNoise(3, SYMBOLS)
    law = mx.random.normal((1, 4, SYMBOLS), key=mx.random.key(1))
    p = mx.softmax(law, axis=-1)
    for x in itertools.product(range(SYMBOLS), repeat=3):
        proposal = Proposal(mx.array([x], dtype=mx.int32))
        q = one_hot(proposal.tokens, SYMBOLS, mx.float32)
        by_token = rules.accept_probabilities(p[:, :3], q, proposal.tokens)[0].tolist()
        ratios = rules.joint_ratios(p[:, :3], q, proposal.tokens)[0].tolist()
        np.testing.assert_allclose(ratios, np.cumprod([1.0, *by_token]), rtol=1e-5)
        verdict = BlockRule().verify(law, proposal, source.at(0, 0))
        assert verdict.kept.shape == (1, 3)


def test_an_abstaining_round_draws_from_the_target_under_both_rules() -> None:
    law = mx.log(mx.array([[[0.0, 1.0, 0.0]]]))
    empty = Proposal(mx.zeros((1, 0), dtype=mx.int32))
    for rule in (BlockRule(), TokenRule()):
        assert rule.verify(law, empty, IndependentNoise(0, 3).at(0, 0)).next.tolist() == [1]


def test_the_block_rule_refuses_to_work_without_random_numbers() -> None:
    proposal = Proposal(mx.array([[1]], dtype=mx.int32))
    with pytest.raises(ValueError, match="temperature 0"):
        BlockRule().verify(mx.zeros((1, 2, 3)), proposal, SilentNoise())
