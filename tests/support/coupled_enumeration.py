"""The law of the coupled rule, in fractions."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import mlx.core as mx
import numpy as np

from mlx_specdec.interfaces import Proposal, Verdict
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
    rest = [k for k in range(len(p)) if k not in (i, j) and q[k]]
    inner = {p[k] * q[j] / (p[i] * q[k]) for k in rest}
    inside = sorted(s for s in inner if s > low and (high is None or s < high))
    edges: list[Fraction | None] = [low, *inside, high]
    if high is not None and high <= low:
        return
    for a, b in itertools.pairwise(edges):
        assert a is not None
        yield a, b


def bounds(p: Law, q: Law, i: int, j: int, s: Fraction) -> list[Fraction]:
    """Return the lower bound of every other E if E_i = 1 and E_j = s."""
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
    """Yield Gumbel vectors well inside of a cell, and none of an empty cell."""
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
    outside = [k for k in range(len(p)) if k not in (i, j)]
    for place in places:
        if i != j:
            least = dict(zip(outside, bounds(p, q, i, j, place[j]), strict=True))
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


class Given:
    """A source of noise with one vector for all rows, or with (rows, batch) vectors."""

    def __init__(self, gumbel: mx.array, rows: int = 0) -> None:
        self._gumbel = mx.stack([gumbel] * rows)[None] if rows else gumbel

    def target(self, count: int) -> mx.array:
        return self._gumbel[:, :count]


def shipped(rows: mx.array, draft_rows: mx.array, proposal: Proposal, gumbel: mx.array) -> Verdict:
    return Coupled().verify(rows, proposal, Given(gumbel))


def round_law(
    target: Model, draft: Model, prefix: tuple[int, ...], n: int, judge: Judge
) -> dict[tuple[int, ...], Fraction]:
    """Return the exact distribution of a round's output, from one noise vector in each cell of each
    row."""
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
    counts = np.array(verdict.accepted).sum(axis=1).tolist()
    for x, length, last, weight in zip(drafts, counts, verdict.next.tolist(), weights, strict=True):
        emitted = (*x[:length], last)
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
        exact = math.prod(target(text[:k])[text[k]] for k in range(tokens))
        total += abs(exact - law_of.get(text, Fraction(0)))
    return total / 2, accepted
