"""Typical acceptance: lossy; keeps what the target finds plausible, drawn or not.

Source: Medusa, arXiv 2401.10774, section 2.3.1: accept x iff p(x) > min(eps, alpha exp(-H(p))), so
that a target that is unsure accepts more.
"""

from __future__ import annotations

import mlx.core as mx

from ..contracts import Noise, Proposal, Verdict
from .chain import draw, entries, leading, row_after


def threshold(p: mx.array, epsilon: float, alpha: float) -> mx.array:
    """min(eps, alpha exp(-H(p))) with the entropy H in nats.

    p: (..., vocabulary) probabilities, any float dtype, which the result keeps. Returns (...).
    """
    entropy = -mx.sum(mx.where(p > 0, p * mx.log(mx.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return mx.minimum(alpha * mx.exp(-entropy), epsilon)


class TypicalRule:
    """Lossy. The token after the kept ones is the target's own, drawn or at temperature 0 its best.

    p is what tokens are drawn from; at temperature 0 the softmax at temperature 1. With
    alpha < 1 the target's likeliest token always passes, since its probability is at least exp(-H).
    """

    def __init__(self, epsilon: float, alpha: float) -> None:
        self._epsilon = epsilon
        self._alpha = alpha

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """As contracts.Rule says; uses `noise.correction`, and no rows of the proposal."""
        rows = log_p.astype(mx.float32)
        p = mx.softmax(rows[:, : proposal.size], axis=-1)
        drafted = entries(p, proposal.tokens)
        kept = leading(drafted > threshold(p, self._epsilon, self._alpha))
        return Verdict(kept, draw(row_after(rows, kept), noise.correction()))
