"""Block verification: the drafted tokens are accepted or rejected jointly, not one by one.

Exact, and on average it keeps at least as many tokens as the token rule. Needs the rows that the
draft was drawn from; for one-hot proposals it equals the token rule.
Source: Sun et al., arXiv 2403.10444, algorithm 2.
"""

from __future__ import annotations

import mlx.core as mx

from ..contracts import Noise, Proposal, Verdict
from .chain import draft_probabilities, draw, entries, row_after


def joint_ratios(p: mx.array, q: mx.array, tokens: mx.array) -> mx.array:
    """r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i)).

    p, q: (batch, n, vocabulary) probabilities; tokens: (batch, n) int32. Returns (batch, n + 1) in
    the dtype of p, 0 from the first token on for which p or q is 0.
    """
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    p_x, q_x = mx.where(q_x > 0, p_x, 0.0), mx.where(q_x > 0, q_x, 1.0)
    ratios = [mx.ones_like(p_x[:, 0])]
    for column in range(tokens.shape[1]):
        ratios.append(mx.minimum(ratios[-1] * p_x[:, column] / q_x[:, column], 1.0))
    return mx.stack(ratios, axis=1)


def accept_probabilities(p: mx.array, q: mx.array, tokens: mx.array) -> mx.array:
    """h_i, the probability that drafted token i ends the kept prefix unless a later one does.

    p: (batch, n + 1, vocabulary), the last row the bonus token's; q: (batch, n, vocabulary).
    Returns (batch, n) in the dtype of p.
    """
    n = tokens.shape[1]
    ratios = joint_ratios(p[:, :n], q, tokens)
    inner = ratios[:, 1:n]
    excess = mx.maximum(inner[..., None] * p[:, 1:n] - q[:, 1:], 0.0).sum(axis=-1)
    total = excess + 1.0 - inner
    # Nothing in excess at ratio 1 means p = q: then the next token is kept for certain.
    inside = mx.where(total > 0, excess / mx.where(total > 0, total, 1.0), 1.0)
    return mx.concatenate([inside, ratios[:, n:]], axis=1)


def correction(p: mx.array, q: mx.array, ratio: mx.array) -> mx.array:
    """The distribution of the token after a kept prefix with joint ratio r: (r p - q)+ normalized.

    p, q: (..., vocabulary) probabilities; ratio: (...). Falls back to p where nothing is left.
    """
    residual = mx.maximum(ratio[..., None] * p - q, 0.0)
    mass = mx.sum(residual, axis=-1, keepdims=True)
    return mx.where(mass > 0, residual / mx.where(mass > 0, mass, 1.0), p)


class BlockRule:
    """Exact. Keeps the longest prefix whose joint test succeeds, not the first failure's."""

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
            raise ValueError("the block rule draws random numbers; at temperature 0 use Coupled")
        passed = uniforms < accept_probabilities(p, q, proposal.tokens)
        order = mx.arange(1, n + 1)
        length = mx.max(mx.where(passed, order, 0), axis=-1, keepdims=True)
        kept = order <= length
        ratios = joint_ratios(p[:, :n], q, proposal.tokens)
        after = mx.concatenate([correction(p[:, :n], q, ratios[:, :n]), p[:, n:]], axis=1)
        return Verdict(kept, draw(mx.log(row_after(after, kept)), noise.correction()))
