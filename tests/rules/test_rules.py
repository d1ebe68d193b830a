"""Every acceptance rule decides as the exact reference does, and the exact rules have the target's
law."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core import rules
from mlx_specdec.core.noise import CoupledNoise, IndependentNoise, SilentNoise, noise_of
from mlx_specdec.types import Proposal, Rule

from . import reference
from .enumeration import Given, Probes, chosen, logs, same, sampled
from .reference import Case, Law, accepted, distance, drafts, drawn, law, toy

DELTA, ALPHA, EPSILONS = Fraction(31, 97), Fraction(53, 97), (Fraction(13, 97), Fraction(85, 97))
"""No toy law has a probability at a boundary that these make. The second epsilon never binds."""
TYPICAL = functools.partial(rules.typical, epsilon=float(EPSILONS[0]), alpha=float(ALPHA))
SIZES = [(0, 3), (1, 8), (2, 4), (3, 1)]
"""Numbers of draft tokens, and how many pairs of toy models are enumerated for each."""


def near_the_best(delta: Fraction, p: Law, own: int, drafted: int) -> bool:
    possible = drafted < len(p) and p[drafted] > 0
    return own == drafted or (possible and p[drafted] >= (1 - delta) * max(p))


def lenient(delta: Fraction, cases: list[Case]) -> Probes:
    return chosen(cases, functools.partial(near_the_best, delta), greedy=True)


def typical(epsilon: Fraction, cases: list[Case]) -> Probes:
    decide = functools.partial(reference.typical, epsilon=epsilon, alpha=ALPHA)
    return sampled(cases, decide, tests=False)


def token(delta: Fraction, cases: list[Case]) -> Probes:
    return sampled(cases, lambda case: reference.token(case, delta))


SHIPPED: dict[str, tuple[Rule, Fraction, Callable[[list[Case]], Probes]]] = {
    "coupled": (rules.coupled, Fraction(0), lambda cases: chosen(cases, same)),
    "greedy": (rules.coupled, Fraction(0), lambda cases: chosen(cases, same, greedy=True)),
    "block": (rules.block, Fraction(0), lambda cases: sampled(cases, reference.block)),
    **{
        f"typical, {epsilon}": (
            functools.partial(rules.typical, epsilon=float(epsilon), alpha=float(ALPHA)),
            Fraction(0),
            functools.partial(typical, epsilon),
        )
        for epsilon in EPSILONS
    },
    **{
        f"{name}, {delta}": (rule, delta, functools.partial(make, delta))
        for name, rule, make in (
            ("token", rules.token, token),
            ("lenient", rules.lenient, lenient),
        )
        for delta in (Fraction(0), DELTA, Fraction(1))
    },
}


@functools.cache
def cases(n: int, seed: int) -> tuple[list[Case], list[Case]]:
    """Return the cases that have a law of each draft token, and those that do not."""
    found = dict.fromkeys(case for draft in drafts(seed, n) for _, case in draft)
    if (n, seed) == (1, 0):
        # A ladder of laws, two steps of which are just beside any threshold for p(x).
        laws = (law(weight, 200, 90) for weight in range(1, 200))
        found |= dict.fromkeys(Case((p, law(1, 2, 3)), (0,), None) for p in laws)
    return [case for case in found if case.q is not None], [case for case in found if not case.q]


@pytest.mark.parametrize(("n", "seeds"), SIZES)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_rule_decides_as_the_reference_at_every_boundary(name: str, n: int, seeds: int) -> None:
    rule, delta, probes = SHIPPED[name]
    for seed in range(seeds):
        for group in filter(None, cases(n, seed)):
            assert probes(group).refusal(rule, float(delta)) == ""


@pytest.mark.parametrize(("n", "seeds"), SIZES)
def test_token_and_block_have_the_law_of_the_target_exactly(n: int, seeds: int) -> None:
    for seed in range(seeds):
        for draft in drafts(seed, n):
            assert distance(toy(seed), draft, reference.token) == 0
            assert distance(toy(seed), draft, reference.block) == 0


def rounds(seeds: int, n: int) -> Iterator[tuple[reference.Model, reference.Draft]]:
    """Yield target models, and rounds of draft models for them."""
    for seed in range(seeds):
        target = toy(seed)
        yield target, drawn(target, toy(seed + 100, target), n)


def test_lenience_moves_the_law_by_at_most_delta_and_never_accepts_less() -> None:
    for target, draft in rounds(40, 1):
        means = []
        for delta in (Fraction(0), DELTA, Fraction(3, 5), Fraction(1)):
            rule = functools.partial(reference.token, delta=delta)
            assert distance(target, draft, rule) <= delta
            means.append(accepted(draft, rule))
        assert means == sorted(means)
        possible = sum(chance for chance, case in draft if case.ratio(0))
        assert means[-1] == possible


def test_block_accepts_at_least_as_many_tokens_as_token() -> None:
    more = 0
    for _, draft in rounds(8, 3):
        by_block, by_token = (accepted(draft, rule) for rule in (reference.block, reference.token))
        assert by_block >= by_token
        more += by_block > by_token
    assert more


def test_block_and_token_accept_alike_if_tokens_were_not_drawn() -> None:
    for case in cases(3, 0)[1]:
        assert reference.block(case).lengths() == reference.token(case).lengths()


def test_typical_always_accepts_the_likeliest_token() -> None:
    for case in cases(2, 0)[1]:
        best = replace(case, x=tuple(p.index(max(p)) for p in case.p[:2]))
        assert reference.typical(best, *EPSILONS[1:], ALPHA).chances == (1, 1)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_nothing_is_accepted_after_a_damaged_row_of_the_target(name: str, damage: float) -> None:
    """The row itself gives -1, which ends the completion with an error."""
    rule, delta, probes = SHIPPED[name]
    probe = probes(cases(2, 0)[0])
    for damaged in range(3):
        log_p, proposal = probe.inputs()
        log_p[:, damaged] = damage
        given = {kind: mx.array(np.array(rows, np.float32)) for kind, rows in probe.noise.items()}
        verdict = rule(log_p, proposal, Given(**given or {"target": None}), float(delta))
        lengths, token = np.array(verdict.accepted).sum(axis=1), np.array(verdict.next)
        assert (lengths <= damaged).all()
        assert ((token == -1) == (lengths == damaged)).all()
        assert (lengths[np.array(probe.length) >= damaged] == damaged).all()


def test_equal_laws_accept_everything_and_correct_from_p() -> None:
    p = mx.array([[logs(law(1, 2, 0))] * 2])
    for rule in (rules.token, rules.block):
        for x, length in ((0, 1), (1, 1), (2, 0)):
            proposal = Proposal(mx.array([[x]], dtype=mx.int32), p[:, :1])
            noise = Given(accept=mx.array([[0.999]]), correction=mx.array([[0.0, 0.0, 9.0]]))
            verdict = rule(p, proposal, noise, 0.0)
            assert verdict.accepted.sum().item() == length and verdict.next.item() == 1


@pytest.mark.parametrize("rule", [rules.coupled, rules.token, rules.block])
def test_rounds_with_real_noise_have_the_law_of_the_target(rule: Rule) -> None:
    """The draft token is drawn as proposers draw it. Coupled accepts as often as it promises."""
    p, q = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.3, 0.4, 0.1, 0.2])
    samples = 1000
    source = (CoupledNoise if rule is rules.coupled else IndependentNoise)(1, 4)
    noise = noise_of([source.at(number, number) for number in range(samples)])
    log_p, log_q = (
        mx.broadcast_to(mx.log(mx.array(row)), (samples, count, 4))
        for row, count in ((p, 2), (q, 1))
    )
    drafted = mx.argmax(log_q + noise.draft(0), axis=-1).astype(mx.int32)
    verdict = rule(log_p, Proposal(drafted, log_q), noise, 0.0)
    kept = np.array(verdict.accepted)[:, 0]
    first = np.where(kept, np.array(drafted)[:, 0], np.array(verdict.next))
    frequencies = np.bincount(first, minlength=4) / samples
    assert (np.abs(frequencies - p) < 4 * np.sqrt(p * (1 - p) / samples)).all()
    chance = np.minimum(p, q).sum()
    if rule is rules.coupled:
        chance = sum(1 / sum(np.maximum(p / p[i], q / q[i])) for i in range(4))
    assert abs(kept.mean() - chance) < 4 * np.sqrt(0.25 / samples)


SYMBOLS, ROWS = 6, 4
ONE_BY_ONE = [
    *((rule, 0.0) for rule in (rules.coupled, rules.token, rules.block, TYPICAL)),
    *((rule, delta) for rule in (rules.lenient, rules.token) for delta in (0.4, 1.0)),
]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("counts", [(0,) * 4, (1,) * 4, (3,) * 4, (3, 0, 2, 1)])
@pytest.mark.parametrize(("rule", "delta"), ONE_BY_ONE)
def test_every_row_of_a_batch_is_decided_as_alone(
    rule: Rule, delta: float, counts: tuple[int, ...], one_hot: bool
) -> None:
    """Padding is token 0, which both models find likeliest. A damaged row hurts no other row."""
    size, lengths = max(counts), set[int]()
    for seed in range(6):
        keys = mx.random.split(mx.random.key(seed), 3)
        likely = 2 * (mx.arange(SYMBOLS) == 0)
        log_p = likely + 2 * mx.random.normal((ROWS, size + 1, SYMBOLS), key=keys[0])
        log_p[1] = mx.where(mx.array(seed % 4 == 3), mx.nan, log_p[1])
        rows = log_p[:, :size] + mx.random.normal((ROWS, size, SYMBOLS), key=keys[1])
        tokens = mx.random.randint(0, 3, (ROWS, size), mx.int32, key=keys[2])
        tokens = mx.where(mx.arange(size) >= mx.array(counts)[:, None], 0, tokens)
        proposal = Proposal(tokens, None if one_hot else rows, counts=counts)
        sources = {rules.coupled: CoupledNoise, rules.lenient: lambda *_: SilentNoise()}
        source = sources.get(rule, IndependentNoise)
        noises = [source(row, SYMBOLS).at(seed, 2 * row) for row in range(ROWS)]
        together = rule(log_p, proposal.for_rules(), noise_of(noises), delta)
        for row, (count, noise) in enumerate(zip(counts, noises, strict=True)):
            alone = rule(log_p[row : row + 1, : count + 1], proposal.of(row), noise, delta)
            found = together.accepted[row].tolist()
            assert found == [*alone.accepted[0].tolist(), *[False] * (size - count)]
            assert together.next[row].item() == alone.next[0].item()
            lengths.add(sum(found))
    assert len(lengths) > min(size, 1)
