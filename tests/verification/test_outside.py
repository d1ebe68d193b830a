"""Tokens that the target does not allow, and rows of a draft that are no distribution."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.contracts import Proposal, Rule
from mlx_specdec.sampling.noise import IndependentNoise, SilentNoise
from mlx_specdec.verification.block import BlockRule
from mlx_specdec.verification.coupled import Coupled, LenientGreedy
from mlx_specdec.verification.rejection import TokenRule
from mlx_specdec.verification.typical import TypicalRule

SYMBOLS = 4
DRAWING = [TokenRule(), TokenRule(0.9), BlockRule(), TypicalRule(0.09, 0.3)]
GREEDY = [Coupled(), LenientGreedy(1.0)]
LAW = mx.log(mx.array([[[0.4, 0.3, 0.3, 0.0]] * 3]))
"""Of two drafted tokens and the bonus; token 3 is banned."""


def kept(rule: Rule, tokens: list[int], seed: int) -> int:
    noise = SilentNoise() if rule in GREEDY else IndependentNoise(seed, SYMBOLS).at(0, 0)
    return int(rule.verify(LAW, Proposal.one_hot([tokens]), noise).kept.sum().item())


@pytest.mark.parametrize("rule", [*DRAWING, *GREEDY])
@pytest.mark.parametrize("token", [3, SYMBOLS, 99])
def test_what_the_target_does_not_allow_is_never_accepted(rule: Rule, token: int) -> None:
    assert not any(kept(rule, [token, 0], seed) for seed in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [BlockRule(), TokenRule()])
@pytest.mark.parametrize("damage", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damaged", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_damaged_rows_of_a_draft_do_not_change_what_is_emitted(
    rule: Rule, damage: float, damaged: int
) -> None:
    """The first token is drawn from p whether its own row is damaged or the one after it."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    law = mx.log(mx.array(np.stack([p] * 3)[None].astype(np.float32)))
    rows = np.log(np.stack([q, q])).astype(np.float32)
    rows[damaged, 1] = damage
    samples, counts = 1000, np.zeros(SYMBOLS)
    draws = np.random.default_rng(0).choice(SYMBOLS, size=samples, p=q)
    for seed, draw in enumerate(draws):
        tokens = [0, 0] if damaged == 0 else [int(draw), 0]
        proposal = Proposal(mx.array([tokens], dtype=mx.int32), mx.array(rows[None]))
        verdict = rule.verify(law, proposal, IndependentNoise(seed, SYMBOLS).at(0, 0))
        accepted = bool(verdict.kept[0, 0].item())
        counts[tokens[0] if accepted else int(verdict.next.item())] += 1
    assert (np.abs(counts / samples - p) < 4.5 * np.sqrt(p * (1 - p) / samples)).all()
