"""The coupled rule by enumeration in Fractions, through the shipped draw and the shipped verdict.

Noise vectors fall into cells (i, j): the target chooses i and the draft j. The chance of a cell is
rational. With E = exp(-g), the target's choice has the least E / p and the draft's the least E / q;
E_j = s E_i leaves the integral of C(s)^-2, where C(s) is the sum of the bounds on all E.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import Proposal, Verdict
from mlx_specdec.sampling.choices import choose
from mlx_specdec.verification.rules import Coupled

Law = tuple[Fraction, ...]
Model = Callable[[tuple[int, ...]], Law]
Judge = Callable[[mx.array, mx.array, Proposal, mx.array], Verdict]
SYMBOLS = 3


def law(*weights: int) -> Law:
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def toy(seed: int, symbols: int = SYMBOLS) -> Model:
    """Conditionals that depend on everything before."""

    @functools.cache
    def conditional(prefix: tuple[int, ...]) -> Law:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        return law(*(int(weight) for weight in generator.integers(1, 12, symbols)))

    return conditional


def pieces(p: Law, q: Law, i: int, j: int) -> Iterator[tuple[Fraction, Fraction | None]]:
    """The stretches of s, None for infinity, on which C(s) is linear."""
    low = p[j] / p[i]
    high = q[j] / q[i] if q[i] else None
    others = [k for k in range(len(p)) if k not in (i, j) and q[k]]
    inner = {p[k] * q[j] / (p[i] * q[k]) for k in others}
    kept = sorted(s for s in inner if s > low and (high is None or s < high))
    edges: list[Fraction | None] = [low, *kept, high]
    if high is not None and high <= low:
        return
    for a, b in itertools.pairwise(edges):
        assert a is not None
        yield a, b


def bounds(p: Law, q: Law, i: int, j: int, s: Fraction) -> list[Fraction]:
    """Where E_i = 1 and E_j = s, what every other E must exceed."""
    return [max(p[k] / p[i], s * q[k] / q[j]) for k in range(len(p)) if k not in (i, j)]


@functools.cache
def chance(p: Law, q: Law, i: int, j: int) -> Fraction:
    """P(target chooses i, draft chooses j) under shared noise."""
    if not p[i] or not q[j]:
        return Fraction(0)
    if i == j:
        return 1 / sum(max(p[k] / p[i], q[k] / q[i]) for k in range(len(p)))
    total = Fraction(0)
    for a, b in pieces(p, q, i, j):
        at_a = 1 + a + sum(bounds(p, q, i, j, a))
        if b is None:
            slope = 1 + a + 1 + sum(bounds(p, q, i, j, a + 1)) - at_a
            total += 1 / (slope * at_a)
        else:
            total += (b - a) / (at_a * (1 + b + sum(bounds(p, q, i, j, b))))
    return total


def noises(p: Law, q: Law, i: int, j: int) -> Iterator[list[float]]:
    """Gumbel vectors well inside of a cell, none where it is empty."""
    if not p[i] or not q[j]:
        return
    if i == j:
        least = {k: max(p[k] / p[i], q[k] / q[i]) for k in range(len(p)) if k != i}
        places = [{i: Fraction(1)}]
    else:
        places, least = [], {}
        for a, b in pieces(p, q, i, j):
            end = b if b is not None else a + 4
            places += [{i: Fraction(1), j: a + (end - a) * Fraction(n, 4)} for n in (1, 2, 3)]
    others = [k for k in range(len(p)) if k not in (i, j)]
    for place in places:
        if i != j:
            least = dict(zip(others, bounds(p, q, i, j, place[j]), strict=True))
        for beyond, scale in ((1.05, 1.0), (3.0, 0.2)):
            rest = {k: float(bound) * beyond + 1e-3 for k, bound in least.items()}
            values = {k: float(v) for k, v in place.items()} | rest
            yield [-math.log(scale * values[k]) for k in range(len(p))]


@functools.cache
def one_noise(p: Law, q: Law, i: int, j: int) -> list[float]:
    return next(noises(p, q, i, j))


@functools.cache
def logs(values: Law) -> list[float]:
    return [math.log(value) if value else -math.inf for value in values]


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
            assert verdict.kept.item() is (i == j)
            assert verdict.next.item() == i
            seen.add((i, j))
    assert seen == {
        (i, j) for i, j in itertools.product(range(len(p)), repeat=2) if chance(p, q, i, j)
    }


class Given:
    """The same noise vector for every row, or (rows, batch) of them."""

    def __init__(self, gumbel: mx.array, rows: int = 0) -> None:
        self._gumbel = mx.stack([gumbel] * rows)[None] if rows else gumbel

    def target(self, count: int) -> mx.array:
        return self._gumbel[:, :count]


def shipped(rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array) -> Verdict:
    return Coupled().verify(rows, proposal, Given(gumbel))


def round_law(
    target: Model, draft: Model, prefix: tuple[int, ...], n: int, judge: Judge
) -> dict[tuple[int, ...], Fraction]:
    """The exact law of what one round emits: one noise vector for every cell of every row."""
    rows, draft_rows, drafts, gumbels, weights = [], [], [], [], []
    cells = list(itertools.product(range(SYMBOLS), repeat=2))
    for chosen in itertools.product(cells, repeat=n):
        x = tuple(j for _, j in chosen)
        p = [target(prefix + x[:k]) for k in range(n + 1)]
        q = [draft(prefix + x[:k]) for k in range(n)]
        weight = math.prod(chance(p[k], q[k], *chosen[k]) for k in range(n))
        if not weight:
            continue
        block = [one_noise(p[k], q[k], *chosen[k]) for k in range(n)]
        for bonus in (k for k in range(SYMBOLS) if p[n][k]):
            rows.append([logs(row) for row in p])
            draft_rows.append([logs(row) for row in q])
            drafts.append(x)
            gumbels.append([*block, one_noise(p[n], p[n], bonus, bonus)])
            weights.append(weight * p[n][bonus])
    proposal = Proposal(mx.array(drafts, dtype=mx.int32), mx.array(draft_rows))
    verdict = judge(mx.array(rows), mx.array(draft_rows), proposal, mx.array(gumbels))
    result: dict[tuple[int, ...], Fraction] = {}
    counts = np.array(verdict.kept).sum(axis=1).tolist()
    for x, kept, last, weight in zip(drafts, counts, verdict.next.tolist(), weights, strict=True):
        emitted = (*x[:kept], last)
        result[emitted] = result.get(emitted, Fraction(0)) + weight
    return result


def distance(
    target: Model, draft: Model, n: int, tokens: int, judge: Judge = shipped
) -> tuple[Fraction, Fraction]:
    """Total variation of the first `tokens` symbols, over rounds, from the target's own law, and
    the mean number of accepted symbols of the first round."""
    law_of: dict[tuple[int, ...], Fraction] = {}
    accepted = Fraction(0)
    waiting = {(): Fraction(1)}
    while waiting:
        prefix = min(waiting, key=len)
        weight = waiting.pop(prefix)
        if len(prefix) >= tokens:
            law_of[prefix[:tokens]] = law_of.get(prefix[:tokens], Fraction(0)) + weight
            continue
        for emitted, share in round_law(target, draft, prefix, n, judge).items():
            longer = prefix + emitted
            waiting[longer] = waiting.get(longer, Fraction(0)) + weight * share
            accepted += 0 if prefix else share * (len(emitted) - 1)
    total = Fraction(0)
    for text in itertools.product(range(SYMBOLS), repeat=tokens):
        own = math.prod(target(text[:k])[text[k]] for k in range(tokens))
        total += abs(own - law_of.get(text, Fraction(0)))
    return total / 2, accepted


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
    other = generator.gumbel(size=(200, 4, SYMBOLS)).astype(np.float32)
    first = Coupled().verify(rows, drafted, Given(mx.array(noise)))
    counts = np.array(first.kept).sum(axis=1)
    assert set(counts.tolist()) == {0, 1, 2, 3}
    later = np.arange(4)[None, :, None] > counts[:, None, None]
    again = Coupled().verify(rows, drafted, Given(mx.array(np.where(later, other, noise))))
    assert mx.array_equal(first.kept, again.kept)
    assert mx.array_equal(first.next, again.next)


def emits_the_draft(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: at the first difference the draft's token is emitted."""
    verdict = shipped(rows, draft_rows, proposal, gumbel)
    count = mx.sum(verdict.kept.astype(mx.int32), axis=-1, keepdims=True)
    padded = mx.concatenate([proposal.tokens, verdict.next[:, None]], axis=1)
    return Verdict(verdict.kept, mx.take_along_axis(padded, count, axis=1)[:, 0])


def ratio_test(
    rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array
) -> Verdict:
    """Mutation: accept where p(x) >= q(x), correct from the noise that drew the draft."""
    x = proposal.tokens[..., None]
    n = proposal.size
    p_x = mx.take_along_axis(mx.softmax(rows[:, :n], axis=-1), x, axis=-1)[..., 0]
    q_x = mx.take_along_axis(mx.softmax(draft_rows, axis=-1), x, axis=-1)[..., 0]
    kept = mx.cumprod((p_x >= q_x).astype(mx.int32), axis=-1)
    own = choose(rows + gumbel, None)
    following = mx.take_along_axis(own, mx.sum(kept, axis=-1, keepdims=True), axis=1)[:, 0]
    return Verdict(kept.astype(mx.bool_), following)


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
    own = choose(rows + gumbel, None)
    same = own[:, : proposal.size] == proposal.tokens
    kept = mx.broadcast_to(same[:, -1:], same.shape) | (mx.cumprod(same, axis=-1) > 0)
    count = mx.sum(kept.astype(mx.int32), axis=-1, keepdims=True)
    return Verdict(kept, mx.take_along_axis(own, count, axis=1)[:, 0])


@pytest.mark.parametrize(
    "mutation",
    [emits_the_draft, ratio_test, bonus_from_the_row_before, accepts_behind_a_difference],
)
def test_the_enumeration_notices_mistakes(mutation: Judge) -> None:
    total, _ = distance(toy(1), toy(101), 2, 3, mutation)
    assert total > Fraction(1, 1000)
