"""The enumeration refuses rules with one fault, among them faults that other programs shipped.

The rules here are written in NumPy, apart from the shipped ones. Each of them is right but for the
part that its entry replaces; without a fault, the enumeration refuses none of them."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.types import Noise, Proposal, Rule, Verdict

from . import reference
from .enumeration import Probes, chosen, same, sampled
from .reference import Case, distance, drawn, toy
from .test_rules import ALPHA, DELTA, EPSILONS, cases, lenient, token, typical

Array = np.ndarray


def normalized(rows: Array, otherwise: Array | float = 0.0) -> Array:
    mass = rows.sum(axis=-1, keepdims=True)
    return np.where(mass > 0, rows / np.where(mass > 0, mass, 1), otherwise)


def exponentials(rows: mx.array) -> Array:
    """Return exp of rows, and 0 for rows that are no distribution."""
    values = np.array(rows, np.float64)
    values = np.exp(values - values.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.where(np.isfinite(values).all(axis=-1, keepdims=True), values, 0)


def weights(proposal: Proposal, size: int) -> Array:
    """Return q before it is normalized."""
    if proposal.rows is None:
        return (np.array(proposal.tokens)[..., None] == np.arange(size)).astype(float)
    with np.errstate(invalid="ignore"):
        return exponentials(proposal.rows)


def at(rows: Array, x: Array) -> Array:
    """Return the entry of each draft token, 0 for ids outside of the vocabulary."""
    last = rows.shape[-1] - 1
    rows = rows[:, : x.shape[1]]
    return np.where(
        x > last, 0, np.take_along_axis(rows, np.minimum(x, last)[..., None], 2)[..., 0]
    )


def ratio(p: Array, q: Array, x: Array) -> Array:
    possible = (at(p, x) > 0) & (at(q, x) > 0)
    return np.where(possible, at(p, x) / np.where(possible, at(q, x), 1), 0)


def first_failures(passed: Array) -> Array:
    return np.cumprod(passed, axis=1).astype(bool)


def longest(passed: Array) -> Array:
    return np.cumsum(passed[:, ::-1], axis=1)[:, ::-1] > 0


def plain_ratios(p: Array, q: Array, x: Array) -> Array:
    return np.ones(x.shape)


def joint_ratios(p: Array, q: Array, x: Array, cap: float = 1.0) -> Array:
    """Return r after 0 .. n tokens."""
    result = [np.ones(len(x))]
    for column in ratio(p, q, x).T:
        result.append(np.minimum(result[-1] * column, cap))
    return np.stack(result, axis=1)


def token_chances(p: Array, q: Array, x: Array, delta: float) -> Array:
    r = ratio(p, q, x)
    return np.where(r > 0, np.minimum(1, r + delta), 0)


def block_chances(p: Array, q: Array, x: Array, delta: float, r: Array | None = None) -> Array:
    r = joint_ratios(p, q, x) if r is None else r
    excess = np.maximum(r[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:], 0).sum(axis=-1)
    total = excess + 1 - r[:, 1:-1]
    return np.hstack([np.where(total > 1e-9, excess / np.where(total > 0, total, 1), 1), r[:, -1:]])


def residual(p: Array, q: Array, x: Array, r: Array) -> Array:
    """Return the laws of the next token after 0 .. n tokens."""
    before = p[:, :-1]
    return np.hstack([normalized(np.maximum(r[..., None] * before - q, 0), before), p[:, -1:]])


def rule(
    chances: Callable[..., Array],
    ratios: Callable[..., Array] = plain_ratios,
    *,
    lengths: Callable[[Array], Array] = first_failures,
    after: Callable[..., Array] = residual,
    below: Callable[[Array, Array], Array] = np.less,
    uniforms: Callable[[Noise, int], Any] = lambda noise, n: noise.accept(n),
    scaled: Callable[[Array], Array] = normalized,
) -> Rule:
    """Make a rule that samples from its parts."""

    def verify(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
        p, x, n = normalized(exponentials(log_p)), np.array(proposal.tokens), proposal.size
        q = scaled(weights(proposal, p.shape[-1]))
        laws = after(p, q, x, ratios(p, q, x)[:, :n])
        drawn_u = np.array(uniforms(noise, n), np.float64)[:, :n]
        accepted = lengths(below(drawn_u, chances(p, q, x, delta)))
        law = laws[np.arange(len(x)), accepted.sum(axis=1)]
        with np.errstate(divide="ignore"):
            scores = np.log(law) + np.array(noise.correction(), np.float64)
        return Verdict(mx.array(accepted), mx.array(scores.argmax(axis=-1).astype(np.int32)))

    return verify


def token_rule(**parts: Any) -> Rule:
    return rule(**{"chances": token_chances, **parts})


def block_rule(**parts: Any) -> Rule:
    return rule(**{"chances": block_chances, "ratios": joint_ratios, "lengths": longest, **parts})


def typical_rule(
    limit: Callable[[Array, float], Array],
    epsilon: Fraction = EPSILONS[0],
    law: int | None = None,
    known: Callable[[Array], Array] = lambda x: x,
) -> Rule:
    def chances(p: Array, q: Array, x: Array, delta: float) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(p * np.log(p), axis=-1)[:, :-1]
        return (at(p, known(x)) > limit(entropy, float(epsilon))).astype(float)

    def after(p: Array, q: Array, x: Array, r: Array) -> Array:
        return p if law is None else np.repeat(p[:, law, None], p.shape[1], axis=1)

    return rule(chances, after=after, uniforms=lambda noise, n: np.full((1, n), 0.5))


def own_rule(
    passes: Callable[..., Array],
    *,
    rows: Callable[[Array], Array] = lambda rows: rows,
    shift: int = 0,
    lengths: Callable[[Array], Array] = first_failures,
    follows: Callable[[Array, Array], Array] = lambda own, x: own,
) -> Rule:
    """Make a rule by which the target's own tokens follow the accepted ones."""

    def verify(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
        p, x, n = normalized(exponentials(log_p)), np.array(proposal.tokens), proposal.size
        gumbel = noise.target(n + 1)
        scores = rows(np.array(log_p, np.float64))
        scores = scores + (0 if gumbel is None else np.roll(np.array(gumbel), shift, axis=1))
        own = scores.argmax(axis=-1)
        q = normalized(weights(proposal, p.shape[-1]))
        accepted = lengths(passes(own[:, :n], p, q, x, delta))
        token = follows(own, x)[np.arange(len(x)), accepted.sum(axis=1)]
        return Verdict(mx.array(accepted), mx.array(token.astype(np.int32)))

    return verify


def equal(own: Array, p: Array, q: Array, x: Array, delta: float) -> Array:
    return own == x


def near(own: Array, p: Array, q: Array, x: Array, delta: float) -> Array:
    best = p[:, :-1].max(axis=-1)
    return (own == x) | ((at(p, x) > 0) & (at(p, x) >= (1 - delta) * best))


def nats(entropy: Array, epsilon: float) -> Array:
    return np.minimum(epsilon, float(ALPHA) * np.exp(-entropy))


RIGHT: dict[str, tuple[Rule, Fraction, Callable[[list[Case]], Probes]]] = {
    "token": (token_rule(), Fraction(0), lambda cases: token(Fraction(0), cases)),
    "lenient token": (token_rule(), DELTA, lambda cases: token(DELTA, cases)),
    "block": (block_rule(), Fraction(0), lambda cases: sampled(cases, reference.block)),
    "coupled": (own_rule(equal), Fraction(0), lambda cases: chosen(cases, same)),
    "lenient": (own_rule(near), DELTA, lambda cases: lenient(DELTA, cases)),
    "typical": (typical_rule(nats), Fraction(0), lambda cases: typical(EPSILONS[0], cases)),
    "typical without epsilon": (
        typical_rule(nats, EPSILONS[1]),
        Fraction(0),
        lambda cases: typical(EPSILONS[1], cases),
    ),
}


def shifted(laws: Array) -> Array:
    return np.hstack([laws[:, 1:], laws[:, -1:]])


def joint(p: Array, q: Array, x: Array, cap: float = 1.0) -> Array:
    """Return the joint ratios, cut at 1 only at the end unless `cap` is 1."""
    return np.minimum(joint_ratios(p, q, x, cap), 1)


def of_certain_tokens(p: Array, q: Array, x: Array, r: Array) -> Array:
    return residual(p, np.where(q == 1, 0, q), x, r)


def from_the_draft(p: Array, q: Array, x: Array, r: Array) -> Array:
    return np.hstack([normalized(np.maximum(q - p[:, :-1], 0), p[:, :-1]), p[:, -1:]])


TOKEN_FAULTS = {
    "the ratio is inverted": token_rule(chances=lambda p, q, x, d: ratio(q, p, x)),
    "x is accepted with p(x)": token_rule(chances=lambda p, q, x, d: at(p, x)),
    "q is not normalized": token_rule(scaled=lambda q: q),
    "a test succeeds at its boundary": token_rule(below=np.less_equal),
    "tokens after a rejected one count": token_rule(lengths=lambda passed: passed),
    "the last success counts": token_rule(lengths=longest),
    "padding is accepted": token_rule(
        chances=lambda p, q, x, d: (x == reference.PADDING) + token_chances(p, q, x, d)
    ),
    "tests use the noise of the correction": token_rule(
        uniforms=lambda noise, n: np.exp(-np.exp(-np.array(noise.correction())))
    ),
    "one number serves all tests": token_rule(
        uniforms=lambda noise, n: np.array(noise.accept(n))[:, :1].repeat(n, 1)
    ),
    "the correction is drawn from p": token_rule(after=lambda p, q, x, r: p),
    "the correction is drawn from q - p": token_rule(after=from_the_draft),
    "the correction has the next row": token_rule(
        after=lambda p, q, x, r: residual(p, q, x, r)[:, [*range(1, p.shape[1]), -1]]
    ),
    "the residual of a draft of certain tokens is p": token_rule(after=of_certain_tokens),
    "the bonus token is drawn from q": token_rule(
        after=lambda p, q, x, r: np.hstack([residual(p, q, x, r)[:, :-1], q[:, -1:]])
    ),
}
LENIENT_TOKEN_FAULTS = {
    "lenience multiplies": token_rule(
        chances=lambda p, q, x, d: np.minimum(1, ratio(p, q, x) * (1 + d))
    ),
    "lenience accepts what p forbids": token_rule(
        chances=lambda p, q, x, d: np.minimum(1, ratio(p, q, x) + d)
    ),
}
BLOCK_FAULTS = {
    "the joint ratio is not capped": block_rule(
        chances=lambda p, q, x, d: block_chances(p, q, x, d, joint(p, q, x, np.inf))
    ),
    "the residual has an uncapped ratio": block_rule(
        ratios=lambda p, q, x: joint_ratios(p, q, x, np.inf)
    ),
    "q counts as 1 in the ratio": block_rule(
        chances=lambda p, q, x, d: block_chances(p, q, x, d, joint(p, np.where(q > 0, 1, 0), x))
    ),
    "a block ends at its first failure": block_rule(lengths=first_failures),
    "the residual has no ratio": block_rule(ratios=plain_ratios),
    "the residual has the ratio of the next token": block_rule(
        ratios=lambda p, q, x: joint(p, q, x)[:, 1:]
    ),
    "a prefix is tested by its ratio": block_rule(chances=lambda p, q, x, d: joint(p, q, x)[:, 1:]),
    "the last test has no history": block_rule(
        chances=lambda p, q, x, d: np.hstack(
            [block_chances(p, q, x, d)[:, :-1], np.minimum(ratio(p, q, x)[:, -1:], 1)]
        )
    ),
}
COUPLED_FAULTS = {
    "noise is shifted by one position": own_rule(equal, shift=1),
    "a match after a difference counts": own_rule(equal, lengths=longest),
    "the draft's token follows at a difference": own_rule(
        equal, follows=lambda own, x: np.hstack([x, own[:, -1:]])
    ),
    "x is accepted if p(x) >= q(x)": own_rule(
        lambda own, p, q, x, d: (at(p, x) > 0) & (at(p, x) >= at(q, x))
    ),
    "the bonus token has the row before": own_rule(
        equal, rows=lambda rows: np.hstack([rows[:, :-1], rows[:, -2:-1]])
    ),
}
LENIENT_FAULTS = {
    "lenience is the share itself": own_rule(lambda own, p, q, x, d: near(own, p, q, x, 1 - d)),
    "lenience is a distance from the best": own_rule(
        lambda own, p, q, x, d: (at(p, x) > 0) & (at(p, x) >= p[:, :-1].max(axis=-1) - d)
    ),
}
TYPICAL_FAULTS = {
    "the larger threshold counts": typical_rule(lambda h, epsilon: np.maximum(epsilon, nats(h, 1))),
    "epsilon does not bound the threshold": typical_rule(lambda h, epsilon: nats(h, 1)),
    "the next token has the first row": typical_rule(nats, law=0),
    "unknown ids mean the last token": typical_rule(nats, known=lambda x: np.minimum(x, 2)),
}
FAULTS = [
    pytest.param(like, wrong, id=f"{like}: {name}")
    for like, faults in {
        "token": TOKEN_FAULTS,
        "lenient token": LENIENT_TOKEN_FAULTS,
        "block": BLOCK_FAULTS,
        "coupled": COUPLED_FAULTS,
        "lenient": LENIENT_FAULTS,
        "typical": TYPICAL_FAULTS,
        "typical without epsilon": {
            "entropy is in bits": typical_rule(lambda h, e: nats(h / np.log(2), e), EPSILONS[1])
        },
    }.items()
    for name, wrong in faults.items()
]


def refused(rule: Rule, like: str) -> bool:
    """Return whether the enumeration refuses a rule that claims to be like another one."""
    _, delta, probes = RIGHT[like]
    groups = [group for seed in range(4) for group in cases(2, seed)]
    return any(probes(group).refusal(rule, float(delta)) for group in groups)


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_rule_without_a_fault_is_right(name: str) -> None:
    assert not refused(RIGHT[name][0], name)


@pytest.mark.parametrize(("like", "wrong"), FAULTS)
def test_a_rule_with_a_fault_is_refused(like: str, wrong: Rule) -> None:
    assert refused(wrong, like)


def greedy(draft: reference.Model) -> reference.Model:
    """A draft that takes its likeliest token."""

    def model(text: reference.Text) -> reference.Law:
        row = draft(text)
        return tuple(Fraction(token == row.index(max(row))) for token in range(len(row)))

    return model


def test_a_law_that_a_draft_was_not_drawn_from_is_noticed() -> None:
    target, draft = toy(0), toy(100)
    assert distance(target, drawn(target, greedy(draft), 2), reference.token) == 0
    claimed = []
    for chance, case in drawn(target, greedy(draft), 2):
        q = tuple(draft(case.x[:place]) for place in range(2))
        claimed.append((chance, Case(case.p, case.x, q)))
    assert distance(target, claimed, reference.token) > Fraction(1, 100)


def test_a_drawn_token_that_is_dropped_for_its_own_probability_is_noticed() -> None:
    """A draft may end before a token is drawn, or after it, but not without it."""
    target, draft = toy(3), toy(103)
    dropped = drawn(target, draft, 2, lambda x: 0 if draft(())[x[0]] < Fraction(2, 5) else 2)
    assert distance(target, dropped, reference.token) > Fraction(1, 1000)
