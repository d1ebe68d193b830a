"""Tokens that the target does not allow, and rows of a draft that are no distribution."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import Proposal, Rule
from mlx_specdec.sampling.noise import IndependentNoise, SilentNoise
from mlx_specdec.verification.rules import BlockRule, Coupled, LenientGreedy, TokenRule, TypicalRule

from ..support.scribe import Drawn

SYMBOLS = 4
DRAWING = [TokenRule(), TokenRule(0.9), BlockRule(), TypicalRule(0.09, 0.3)]
GREEDY = [Coupled(), LenientGreedy(1.0)]
LAW = mx.log(mx.array([[[0.4, 0.3, 0.3, 0.0]] * 3]))
"""Of two drafted tokens and the bonus; token 3 is banned."""


def kept(rule: Rule, tokens: list[int], seed: int) -> int:
    noise = SilentNoise() if rule in GREEDY else IndependentNoise(seed, SYMBOLS).at(0, 0)
    return int(rule.verify(LAW, Proposal.one_hot([tokens]), noise).accepted.sum().item())


@pytest.mark.parametrize("rule", [*DRAWING, *GREEDY])
@pytest.mark.parametrize("token", [3, SYMBOLS, 99])
def test_what_the_target_does_not_allow_is_never_accepted(rule: Rule, token: int) -> None:
    assert not any(kept(rule, [token, 0], seed) for seed in range(20))


@pytest.mark.parametrize("rule", [BlockRule(), TokenRule()])
@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("damaged", [0, 1])
def test_damaged_rows_of_a_draft_do_not_change_what_is_emitted(
    rule: Rule, damage: float, damaged: int
) -> None:
    """The first token is drawn from p whether its own row is damaged or the one after it."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    law = np.log(np.stack([p] * 3)).astype(np.float32)
    rows = np.log(np.stack([q, q])).astype(np.float32)
    rows[damaged, 1] = damage
    samples, generator = 1000, np.random.default_rng(0)
    tokens = np.zeros((samples, 2), dtype=np.int32)
    if damaged == 1:
        tokens[:, 0] = generator.choice(SYMBOLS, size=samples, p=q)
    noise = Drawn(generator, samples, SYMBOLS)
    many = [mx.array(np.repeat(array[None], samples, axis=0)) for array in (law, rows)]
    verdict = rule.verify(many[0], Proposal(mx.array(tokens), many[1]), noise)
    emitted = np.where(np.array(verdict.accepted)[:, 0], tokens[:, 0], np.array(verdict.next))
    counts = np.bincount(emitted, minlength=SYMBOLS)
    assert (np.abs(counts / samples - p) < 4.5 * np.sqrt(p * (1 - p) / samples)).all()
