"""Typical acceptance: its threshold, verdicts on both sides of it, what it never refuses."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import Proposal
from mlx_specdec.sampling.noise import IndependentNoise, SilentNoise
from mlx_specdec.verification.rules import TypicalRule, threshold


def test_the_threshold_falls_with_entropy_and_never_exceeds_epsilon() -> None:
    sure = mx.array([1.0, 0.0, 0.0, 0.0])
    unsure = mx.array([0.25] * 4)
    assert threshold(sure, 0.09, 0.3).item() == pytest.approx(0.09)
    assert threshold(unsure, 0.09, 0.3).item() == pytest.approx(0.3 * math.exp(-math.log(4)))
    assert threshold(sure, 0.9, 0.3).item() == pytest.approx(0.3)


@pytest.mark.parametrize(("token", "accepted"), [(0, True), (1, True), (2, False), (3, False)])
def test_judge_accepts_above_the_threshold_and_not_below(token: int, accepted: bool) -> None:
    p = [0.62, 0.21, 0.15, 0.02]
    limit = threshold(mx.array(p), 0.9, 0.5).item()
    assert 0.15 < limit < 0.21
    law = mx.log(mx.array([[p, p]]))
    proposal = Proposal(mx.array([[token]], dtype=mx.int32))
    verdict = TypicalRule(0.9, 0.5).verify(law, proposal, SilentNoise())
    assert verdict.accepted.tolist() == [[accepted]]
    assert verdict.next.tolist() == [0]


def test_the_likeliest_token_always_passes_and_nothing_behind_a_refusal() -> None:
    law = 3 * mx.random.normal((200, 3, 7), key=mx.random.key(0))
    best = mx.argmax(law, axis=-1).astype(mx.int32)
    rule = TypicalRule(0.09, 0.3)
    noise = IndependentNoise(0, 7).at(0, 0)
    assert mx.all(rule.verify(law, Proposal(best[:, :2]), noise).accepted)
    worst = mx.argmin(law, axis=-1).astype(mx.int32)
    mixed = mx.concatenate([worst[:, :1], best[:, 1:2]], axis=1)
    verdict = rule.verify(law, Proposal(mixed), noise)
    first = np.array(verdict.accepted)[:, 0]
    assert not first.all()
    assert not np.array(verdict.accepted)[~first].any()


def test_the_next_token_is_the_targets_own_draw() -> None:
    law = mx.random.normal((1, 2, 5), key=mx.random.key(1))
    noise = IndependentNoise(4, 5).at(0, 0)
    verdict = TypicalRule(0.0, 0.3).verify(law, Proposal(mx.array([[2]], dtype=mx.int32)), noise)
    choice = mx.argmax(law[:, 1] + noise.correction(), axis=-1)
    assert verdict.accepted.tolist() == [[True]]
    assert verdict.next.tolist() == choice.tolist()
