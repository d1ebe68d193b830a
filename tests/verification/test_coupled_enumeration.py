"""The coupled rule by enumeration in Fractions, through the shipped draw and the shipped verdict.

Noise vectors fall into cells (i, j): the target chooses i and the draft j. The chance of a cell is
rational. With E = exp(-g), the target's choice has the least E / p and the draft's the least E / q;
E_j = s E_i leaves the integral of C(s)^-2, where C(s) is the sum of the bounds on all E.
"""

import itertools
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import Proposal, Verdict
from mlx_specdec.sampling.distribution import choose
from mlx_specdec.verification.rules import Coupled

from ..support.coupled_enumeration import (
    SYMBOLS,
    Given,
    Judge,
    Law,
    chance,
    distance,
    law,
    logs,
    noises,
    shipped,
    toy,
)

LAWS = [
    (law(5, 2, 2, 1), law(3, 4, 1, 2)),
    (law(1, 1, 1), law(1, 1, 1)),
    (law(8, 1, 1), law(1, 1, 8)),
    (law(3, 0, 2), law(1, 4, 2)),
    (law(3, 1, 2), law(1, 0, 2)),
    (law(1, 0), law(0, 1)),
    (law(7, 3, 5, 2, 4), law(1, 6, 2, 9, 3)),
]


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_the_marginals_of_the_joint_law_are_both_laws_exactly(p: Law, q: Law) -> None:
    symbols = range(len(p))
    assert tuple(sum(chance(p, q, i, j) for j in symbols) for i in symbols) == p
    assert tuple(sum(chance(p, q, i, j) for i in symbols) for j in symbols) == q


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_the_shipped_draw_and_verdict_return_the_cell_of_the_noise(p: Law, q: Law) -> None:
    seen = set()
    for i, j in itertools.product(range(len(p)), repeat=2):
        for noise in noises(p, q, i, j):
            gumbel = mx.array(noise)
            drafted = choose(mx.array(logs(q)), gumbel)
            assert drafted.item() == j
            rows = mx.array([[logs(p), logs(p)]])
            verdict = Coupled().verify(rows, Proposal(drafted.reshape(1, 1)), Given(gumbel, 2))
            assert verdict.accepted.item() is (i == j)
            assert verdict.next.item() == i
            seen.add((i, j))
    assert seen == {
        (i, j) for i, j in itertools.product(range(len(p)), repeat=2) if chance(p, q, i, j)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "tokens"), [(1, 3), (2, 3)])
def test_the_joint_law_over_several_rounds_is_the_targets_exactly(
    seed: int, n: int, tokens: int
) -> None:
    total, accepted = distance(toy(seed), toy(seed + 100), n, tokens)
    assert total == 0
    assert 0 < accepted < n


def test_what_is_decided_does_not_depend_on_later_noise() -> None:
    """So the noise of discarded positions may be used again: it has decided nothing."""
    generator = np.random.default_rng(0)
    rows = mx.array(generator.normal(size=(200, 4, SYMBOLS)).astype(np.float32))
    drafted = Proposal(mx.array(generator.integers(0, SYMBOLS, (200, 3)), dtype=mx.int32))
    noise = generator.gumbel(size=(200, 4, SYMBOLS)).astype(np.float32)
    second = generator.gumbel(size=(200, 4, SYMBOLS)).astype(np.float32)
    first = Coupled().verify(rows, drafted, Given(mx.array(noise)))
    counts = np.array(first.accepted).sum(axis=1)
    assert set(counts.tolist()) == {0, 1, 2, 3}
    later = np.arange(4)[None, :, None] > counts[:, None, None]
    again = Coupled().verify(rows, drafted, Given(mx.array(np.where(later, second, noise))))
    assert mx.array_equal(first.accepted, again.accepted)
    assert mx.array_equal(first.next, again.next)


def emits_the_draft(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: at the first difference the draft's token is emitted."""
    verdict = shipped(rows, draft_rows, proposal, gumbel)
    count = mx.sum(verdict.accepted.astype(mx.int32), axis=-1, keepdims=True)
    padded = mx.concatenate([proposal.tokens, verdict.next[:, None]], axis=1)
    return Verdict(verdict.accepted, mx.take_along_axis(padded, count, axis=1)[:, 0])


def ratio_test(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: accept where p(x) >= q(x), correct from the noise that drew the draft."""
    x = proposal.tokens[..., None]
    n = proposal.size
    p_x = mx.take_along_axis(mx.softmax(rows[:, :n], axis=-1), x, axis=-1)[..., 0]
    q_x = mx.take_along_axis(mx.softmax(draft_rows, axis=-1), x, axis=-1)[..., 0]
    accepted = mx.cumprod((p_x >= q_x).astype(mx.int32), axis=-1)
    choice = choose(rows + gumbel, None)
    following = mx.take_along_axis(choice, mx.sum(accepted, axis=-1, keepdims=True), axis=1)[:, 0]
    return Verdict(accepted.astype(mx.bool_), following)


def bonus_from_the_row_before(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: where everything was accepted, the bonus comes from the last drafted row."""
    shifted = mx.concatenate([rows[:, :-1], rows[:, -2:-1]], axis=1)
    return shipped(shifted, draft_rows, proposal, gumbel)


def accepts_behind_a_difference(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: a last token that matches is kept although one before it does not."""
    choice = choose(rows + gumbel, None)
    same = choice[:, : proposal.size] == proposal.tokens
    accepted = mx.broadcast_to(same[:, -1:], same.shape) | (mx.cumprod(same, axis=-1) > 0)
    count = mx.sum(accepted.astype(mx.int32), axis=-1, keepdims=True)
    return Verdict(accepted, mx.take_along_axis(choice, count, axis=1)[:, 0])


@pytest.mark.parametrize(
    "mutation",
    [emits_the_draft, ratio_test, bonus_from_the_row_before, accepts_behind_a_difference],
)
def test_the_enumeration_notices_mistakes(mutation: Judge) -> None:
    total, _ = distance(toy(1), toy(101), 2, 3, mutation)
    assert total > Fraction(1, 1000)
