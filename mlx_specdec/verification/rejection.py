"""Speculative sampling, token by token: accept with min(1, p/q), else draw from the residual.

Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318. With
delta > 0 the rule is lossy: acceptance min(1, p/q + delta) while the residual stays (p - q)+, which
keeps the emitted distribution within total variation delta of p at every token. What p does not
allow at all (a ban, a filter) lenience does not allow either.
"""

from __future__ import annotations

import mlx.core as mx

from ..contracts import Noise, Proposal, Verdict
from .chain import draft_probabilities, draw, entries, leading, row_after


def accept_probabilities(
    p: mx.array, q: mx.array, tokens: mx.array, delta: float = 0.0
) -> mx.array:
    """min(1, p(x)/q(x) + delta) for each drafted token x, but 0 where p(x) or q(x) is 0.

    p, q: (batch, n, vocabulary) probabilities, any float dtype, which the result keeps; q may have
    rows of zeros. tokens: (batch, n) int32, drawn from q. Returns (batch, n).
    """
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    possible = (p_x > 0) & (q_x > 0)
    ratio = p_x / mx.where(possible, q_x, 1.0)
    return mx.where(possible, mx.minimum(ratio + delta, 1.0), 0.0)


def correction(p: mx.array, q: mx.array) -> mx.array:
    """The distribution after a rejection: (p - q)+ normalized, p itself where that is empty.

    p, q: (..., vocabulary) probabilities, any float dtype, which the result keeps.
    """
    residual = mx.maximum(p - q, 0.0)
    mass = mx.sum(residual, axis=-1, keepdims=True)
    return mx.where(mass > 0, residual / mx.where(mass > 0, mass, 1.0), p)


class TokenRule:
    """Exact for delta = 0. Needs the rows that the drafted tokens were drawn from, or one-hot."""

    def __init__(self, delta: float = 0.0) -> None:
        self._delta = delta

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """As contracts.Rule says; uses `noise.accept` and `noise.correction`."""
        p = mx.softmax(log_p.astype(mx.float32), axis=-1)
        n = proposal.size
        if n == 0:
            kept = mx.zeros((p.shape[0], 0), dtype=mx.bool_)
            return Verdict(kept, draw(mx.log(p[:, 0]), noise.correction()))
        q = draft_probabilities(proposal, p.shape[-1])
        uniforms = noise.accept(n)
        if uniforms is None:
            raise ValueError("the token rule draws random numbers; at temperature 0 use Coupled")
        kept = leading(uniforms < accept_probabilities(p[:, :n], q, proposal.tokens, self._delta))
        after = mx.concatenate([correction(p[:, :n], q), p[:, n:]], axis=1)
        return Verdict(kept, draw(mx.log(row_after(after, kept)), noise.correction()))
