"""Mistakes that others shipped in the token and the block rule: enumeration notices each of them.

Each mutation gives, like the shipped functions, P(length kept) and the law of the token after it.
"""

import itertools

import numpy as np
import pytest

from mlx_specdec.verification import rules

from ..support.block_enumeration import (
    SYMBOLS,
    Kept,
    Model,
    block_lengths,
    distance,
    in_float64,
    joint,
    token_lengths,
    toy,
)

Lengths = tuple[np.ndarray, np.ndarray]


def chain(accept: np.ndarray) -> np.ndarray:
    """P(length = 0 .. n) of each draft where acceptance stops at the first failure."""
    one = np.ones((len(accept), 1))
    return np.hstack([one, np.cumprod(accept, axis=1)]) * np.hstack([1 - accept, one])


def normalised(rows: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    mass = rows.sum(axis=-1, keepdims=True)
    return np.where(mass > 0, rows / np.where(mass > 0, mass, 1), otherwise)


def chosen(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.take_along_axis(rows[:, : x.shape[1]], x[..., None], axis=2)[..., 0]


def corrected_from_the_target(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    return token_lengths(p, q, x)[0], p


def inverted_ratio(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    p_x = chosen(p, x)
    accept = np.minimum(1, chosen(q, x) / np.where(p_x > 0, p_x, 1e-300))
    return chain(accept), token_lengths(p, q, x)[1]


def residual_of_the_next_row(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    lengths, after = token_lengths(p, q, x)
    return lengths, np.concatenate([after[:, 1:], p[:, -1:]], axis=1)


def bonus_from_the_draft(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    lengths, after = token_lengths(p, q, x)
    return lengths, np.concatenate([after[:, :-1], q[:, -1:]], axis=1)


def drawn_greedily_scored_as_sampled(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    """The draft's best token is proposed and judged as if it had been drawn from q."""
    best = np.argmax(q, axis=-1)
    accept = in_float64(rules.accept_probabilities, p[:, :-1], q, best)
    return chain(np.where(best == x, accept, 0)), token_lengths(p, q, x)[1]


def matches_and_corrects_with_the_residual(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    """Accept as independent samples match, p(x); then the residual is not what is left."""
    return chain(chosen(p, x)), token_lengths(p, q, x)[1]


def stops_at_the_first_failure(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    lengths, after = block_lengths(p, q, x)
    longer = np.cumsum(lengths[:, ::-1], axis=1)[:, ::-1]
    accept = np.zeros(x.shape)
    np.divide(lengths[:, 1:], longer[:, 1:], out=accept, where=longer[:, 1:] > 0)
    return chain(accept), after


def residual_of_the_token_rule(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    return block_lengths(p, q, x)[0], token_lengths(p, q, x)[1]


def ratios_without_the_cap(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    """r_i as a plain product of p / q, cut at 1 only at the end."""
    ratios = np.minimum(1, np.cumprod(chosen(p, x) / chosen(q, x), axis=1))
    return _block_with(ratios, p, q)


def draft_row_taken_as_one(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
    """A q that is not given counts as 1 in the product although the token was drawn from it."""
    return _block_with(np.minimum.accumulate(np.cumprod(chosen(p, x), axis=1), axis=1), p, q)


def _block_with(ratios: np.ndarray, p: np.ndarray, q: np.ndarray) -> Lengths:
    count, n = ratios.shape
    one = np.ones((count, 1))
    excess = np.maximum(ratios[:, :-1, None] * p[:, 1:n] - q[:, 1:], 0).sum(axis=-1)
    total = excess + 1 - ratios[:, :-1]
    inner = np.divide(excess, total, out=np.ones((count, n - 1)), where=total > 0)
    accept = np.hstack([inner, ratios[:, -1:]])
    later_fail = np.hstack([np.cumprod((1 - accept)[:, ::-1], axis=1)[:, ::-1], one])
    before = np.hstack([one, ratios[:, :-1]])
    after = normalised(np.maximum(before[..., None] * p[:, :-1] - q, 0), p[:, :-1])
    return np.hstack([one, accept]) * later_fail, np.concatenate([after, p[:, -1:]], axis=1)


MISTAKES = [
    corrected_from_the_target,
    inverted_ratio,
    residual_of_the_next_row,
    bonus_from_the_draft,
    drawn_greedily_scored_as_sampled,
    matches_and_corrects_with_the_residual,
    stops_at_the_first_failure,
    residual_of_the_token_rule,
    ratios_without_the_cap,
    draft_row_taken_as_one,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_enumeration_notices(mistake: Kept) -> None:
    found = []
    for seed in range(3):
        law, _ = joint(toy(seed), toy(seed + 100), mistake, 2, 3)
        found.append(distance(toy(seed), law, 3))
    assert max(found) > 1e-3


def flat(seed: int) -> Model:
    """A law that does not look at its prefix: the same noise then draws the same token again."""
    row = np.random.default_rng(seed).dirichlet(np.ones(SYMBOLS), 4)
    return lambda prefix: row[len(prefix)]


def with_noise_keyed_by_position(rule: Kept, target: Model, draft: Model) -> dict:
    """Two emitted symbols where the second position's draft, once discarded, is drawn again."""

    def one(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> Lengths:
        [lengths], [after] = rule(p[None], q[None], x[None])
        return lengths, after

    law: dict[tuple[int, ...], float] = {}
    for x in itertools.product(range(SYMBOLS), repeat=2):
        q = np.stack([draft(()), draft((x[0],))])
        p = np.stack([target(x[:k]) for k in range(3)])
        lengths, after = one(p, q, np.array(x))
        chance = q[0, x[0]] * q[1, x[1]]
        law[x] = law.get(x, 0.0) + chance * lengths[2]
        for y in range(SYMBOLS):
            law[x[0], y] = law.get((x[0], y), 0.0) + chance * lengths[1] * after[1, y]
            again = np.array(x[1:])
            rows = np.stack([target((y,)), target((y, x[1]))])
            accepted, following = one(rows, draft((y,))[None], again)
            for z in range(SYMBOLS):
                second = (accepted[1] if z == x[1] else 0.0) + accepted[0] * following[0, z]
                more = chance * lengths[0] * after[0, y] * second
                law[y, z] = law.get((y, z), 0.0) + more
    return law


def test_noise_keyed_by_position_alone_is_noticed_under_block_and_harmless_under_token() -> None:
    by_block, by_token = [], []
    for seed in range(6):
        target, draft = toy(seed), flat(seed + 50)
        law = with_noise_keyed_by_position(block_lengths, target, draft)
        by_block.append(distance(target, law, 2))
        law = with_noise_keyed_by_position(token_lengths, target, draft)
        by_token.append(distance(target, law, 2))
    assert max(by_block) > 1e-3
    assert max(by_token) < 1e-9


def test_dropping_a_drawn_token_for_its_own_low_probability_is_noticed() -> None:
    """Looking at the row before drawing, or keeping the token, would be exact."""
    target, draft = toy(3), toy(103)
    p, q = target(()), draft(())
    law = np.zeros(SYMBOLS)
    accept = np.minimum(1, p / np.where(q > 0, q, 1))
    residual = normalised(np.maximum(p - q, 0), p)
    for x in range(SYMBOLS):
        if q[x] < 0.4:
            law += q[x] * p
        else:
            law[x] += q[x] * accept[x]
            law += q[x] * (1 - accept[x]) * residual
    assert np.abs(law - p).sum() / 2 > 1e-3
