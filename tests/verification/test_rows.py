"""A rule decides about every sequence of a batch as if it were alone."""

import mlx.core as mx
import pytest

from mlx_specdec.interfaces import Proposal, Rule
from mlx_specdec.sampling.noise import CoupledNoise, IndependentNoise, noise_of
from mlx_specdec.verification.rules import BlockRule, Coupled, LenientGreedy, TokenRule, TypicalRule

SYMBOLS = 6
ROWS = 4
LOSSY = [LenientGreedy(0.5), LenientGreedy(1.0), TokenRule(0.3), TokenRule(0.9)]
RULES = [Coupled(), TokenRule(), BlockRule(), *LOSSY, TypicalRule(0.3, 0.5)]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_every_row_is_decided_as_alone(rule: Rule, size: int, one_hot: bool) -> None:
    for seed in range(6):
        keys = mx.random.split(mx.random.key(seed), 3)
        log_p = 2 * mx.random.normal((ROWS, size + 1, SYMBOLS), key=keys[0])
        # One sequence's row is damaged; others must not notice.
        log_p[1] = mx.where(mx.array(seed % 2 == 1), mx.nan, log_p[1])
        rows = log_p[:, :size] + mx.random.normal((ROWS, size, SYMBOLS), key=keys[1])
        tokens = mx.random.randint(0, SYMBOLS, (ROWS, size), mx.int32, key=keys[2])
        proposal = Proposal(tokens, None if one_hot else rows)
        source = CoupledNoise if isinstance(rule, Coupled) else IndependentNoise
        noises = [source(row, SYMBOLS).at(seed, 2 * row) for row in range(ROWS)]
        together = rule.verify(log_p, proposal, noise_of(noises))
        for row, noise in enumerate(noises):
            alone = rule.verify(log_p[row : row + 1], proposal.of(row), noise)
            assert mx.array_equal(together.accepted[row : row + 1], alone.accepted)
            assert mx.array_equal(together.next[row : row + 1], alone.next)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_proposed_less_is_decided_as_alone(rule: Rule, one_hot: bool) -> None:
    """What fills up the rectangle is token 0, which both models find likeliest."""
    counts, size = (3, 0, 2, 1), 3
    lengths: set[int] = set()
    for seed in range(20):
        keys = mx.random.split(mx.random.key(seed), 3)
        likely = 2 * (mx.arange(SYMBOLS) == 0)
        log_p = likely + mx.random.normal((ROWS, size + 1, SYMBOLS), key=keys[0])
        rows = likely + mx.random.normal((ROWS, size, SYMBOLS), key=keys[1])
        tokens = mx.random.randint(0, 3, (ROWS, size), mx.int32, key=keys[2])
        fills = mx.arange(size) >= mx.array(counts)[:, None]
        tokens = mx.where(fills, 0, tokens)
        proposal = Proposal(tokens, None if one_hot else rows, counts=counts)
        source = CoupledNoise if isinstance(rule, Coupled) else IndependentNoise
        noises = [source(row, SYMBOLS).at(seed, 2 * row) for row in range(ROWS)]
        together = rule.verify(log_p, proposal.for_rules(), noise_of(noises))
        for row, (count, noise) in enumerate(zip(counts, noises, strict=True)):
            rows_alone = log_p[row : row + 1, : count + 1]
            alone = rule.verify(rows_alone, proposal.of(row), noise)
            accepted = together.accepted[row].tolist()
            assert accepted == [*alone.accepted[0].tolist(), *[False] * (size - count)]
            assert together.next[row].item() == alone.next[0].item()
            lengths.add(sum(accepted))
    assert {0, 1, 2} <= lengths


@pytest.mark.parametrize("rule", [BlockRule(), TokenRule(), TypicalRule(0.09, 0.3)])
def test_an_abstaining_round_draws_from_the_target(rule: Rule) -> None:
    law = mx.log(mx.array([[[0.0, 1.0, 0.0]]]))
    empty = Proposal(mx.zeros((1, 0), dtype=mx.int32))
    verdict = rule.verify(law, empty, IndependentNoise(0, 3).at(0, 0))
    assert verdict.next.tolist() == [1] and verdict.accepted.shape == (1, 0)
