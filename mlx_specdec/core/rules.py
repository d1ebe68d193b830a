"""The acceptance rules and their arithmetic on arrays.

A rule is a function `(log_p, proposal, noise, delta) -> Verdict`; see `types.Rule`. Rules only
depend on their arguments, and every row of a batch is decided as if it were alone."""

import math
from collections.abc import Callable

import mlx.core as mx

from ..types import Noise, Proposal, Verdict
from .distribution import choose


def leading(accepted: mx.array) -> mx.array:
    """Set all entries after the first False to False: (batch, n) bool -> (batch, n) bool."""
    return mx.cumprod(accepted.astype(mx.int32), axis=-1).astype(mx.bool_)


def row_after(rows: mx.array, accepted: mx.array) -> mx.array:
    """Return the row of each sequence after its accepted tokens, (batch, ...). rows: (batch, n + 1,
    ...). accepted: (batch, n) bool, from `leading`."""
    count = mx.sum(accepted, axis=-1, keepdims=True)
    index = count.reshape(count.shape + (1,) * (rows.ndim - 2))
    return mx.take_along_axis(rows, index, axis=1)[:, 0]


def entries(rows: mx.array, tokens: mx.array, outside: float = 0.0) -> mx.array:
    """Return the entry of each row at the row's token, (batch, n); `outside` for ids beyond the
    vocabulary. rows: (batch, n, vocabulary). tokens: (batch, n) int32."""
    last = rows.shape[-1] - 1
    index = mx.minimum(tokens, last)[..., None]
    inside = mx.take_along_axis(rows, index, axis=-1)[..., 0]
    return mx.where(tokens > last, mx.array(outside, dtype=rows.dtype), inside)


def draft_probabilities(proposal: Proposal, vocabulary: int) -> mx.array:
    """Return q, the distributions of the draft tokens, (batch, n, vocabulary) float32.

    A row is zero if its logits are NaN or masked, or if the token is beyond the target's
    vocabulary. Rules then reject the token and draw the correction from p alone, which is exact."""
    if proposal.rows is None:
        return (proposal.tokens[..., None] == mx.arange(vocabulary)).astype(mx.float32)
    q = mx.softmax(proposal.rows, axis=-1)
    return mx.where(q >= 0, q, 0.0)


def draw(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """Return the Gumbel-max choice of each row, (...) int32; -1 if the row's maximum is not finite.
    See `choose`."""
    finite = mx.isfinite(mx.max(log_p, axis=-1))
    return mx.where(finite, choose(log_p, gumbel), -1)


def coupled(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
    """Accept the draft tokens that the target would draw with the same noise. This is exact at
    every temperature.

    It uses neither q nor `delta`. `noise.target` is the noise with which the proposer drew its
    tokens."""
    return _own_choice(log_p, proposal, noise, lambda rows, choice: choice == proposal.tokens)


def lenient(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
    """Accept x iff p(x) >= (1 - delta) max p. This is the lossy rule for temperature 0.

    p is the softmax at temperature 1 of the penalised logits. delta = 0 is greedy matching, and
    delta = 1 accepts every token that is not banned. Acceptance never decreases with delta. Based
    on Leviathan et al., arXiv 2211.17192, appendix A.5; their l is 1 - delta."""
    slack = math.log1p(-delta) if delta < 1 else -math.inf

    def passes(rows: mx.array, choice: mx.array) -> mx.array:
        drafted = entries(rows, proposal.tokens, -mx.inf).astype(mx.float32)
        best = mx.max(rows, axis=-1).astype(mx.float32)
        return (choice == proposal.tokens) | ((drafted >= best + slack) & mx.isfinite(drafted))

    return _own_choice(log_p, proposal, noise, passes)


Passes = Callable[[mx.array, mx.array], mx.array]
"""A function of log_p, (batch, n, vocabulary), and of the target's own tokens, (batch, n) int32. It
returns which draft tokens are accepted if all tokens before them are, (batch, n) bool."""


def _own_choice(log_p: mx.array, proposal: Proposal, noise: Noise, passes: Passes) -> Verdict:
    """Compare a proposal with the target's own tokens. The next token is one of them."""
    n = proposal.size
    choice = draw(log_p, noise.target(n + 1))
    if n == 0:
        # A shortcut for plain steps, in which every additional operation costs time.
        return Verdict(mx.zeros((len(choice), 0), dtype=mx.bool_), choice.squeeze(1))
    accepted = leading(passes(log_p[:, :n], choice[:, :n]))
    return Verdict(accepted, row_after(choice, accepted))


def accept_probabilities(
    p: mx.array, q: mx.array, tokens: mx.array, delta: float = 0.0
) -> mx.array:
    """Return min(1, p(x)/q(x) + delta) for each draft token x, or 0 if p(x) or q(x) is 0.

    Args:
        p, q: (batch, n, vocabulary) probabilities of a float dtype, which the result has too. Rows
            of q may be zero.
        tokens: (batch, n) int32, drawn from q."""
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    possible = (p_x > 0) & (q_x > 0)
    ratio = p_x / mx.where(possible, q_x, 1.0)
    return mx.where(possible, mx.minimum(ratio + delta, 1.0), 0.0)


def correction(p: mx.array, q: mx.array, ratio: mx.array | None = None) -> mx.array:
    """Return the distribution of the correction token: max(r p - q, 0), normalized.

    Args:
        p, q: (..., vocabulary) probabilities of a float dtype, which the result has too. The result
            is p in rows whose residual is zero.
        ratio: (...), the joint ratio r of the accepted prefix; None means 1."""
    residual = mx.maximum((p if ratio is None else ratio[..., None] * p) - q, 0.0)
    mass = mx.sum(residual, axis=-1, keepdims=True)
    return mx.where(mass > 0, residual / mx.where(mass > 0, mass, 1.0), p)


def token(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
    """Test the draft tokens one by one up to the first rejection. This is exact if delta = 0.

    `_sampled` names the noise that it uses."""

    def judge(p: mx.array, q: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
        passed = uniforms < accept_probabilities(p, q, proposal.tokens, delta)
        return leading(passed), correction(p, q)

    return _sampled(log_p, proposal, noise, judge)


def joint_ratios(p: mx.array, q: mx.array, tokens: mx.array) -> mx.array:
    """Return the joint ratios r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i)).

    The result is (batch, n + 1) in the dtype of p. It is 0 from the first token on for which p or q
    is 0, or p is NaN. p, q: (batch, n, vocabulary). tokens: (batch, n) int32."""
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    possible = (p_x > 0) & (q_x > 0)
    p_x, q_x = mx.where(possible, p_x, 0.0), mx.where(possible, q_x, 1.0)
    ratios = [mx.ones_like(p_x[:, 0])]
    for column in range(tokens.shape[1]):
        ratios.append(mx.minimum(ratios[-1] * p_x[:, column] / q_x[:, column], 1.0))
    return mx.stack(ratios, axis=1)


def block_accept_probabilities(p: mx.array, q: mx.array, ratios: mx.array) -> mx.array:
    """Return h_i, (batch, n) in the dtype of p: the probability that the accepted prefix ends with
    draft token i if it does not end with a later token.

    Args:
        p, q: (batch, n, vocabulary) probabilities.
        ratios: (batch, n + 1), from `joint_ratios`."""
    n = q.shape[1]
    inner = ratios[:, 1:n]
    excess = mx.maximum(inner[..., None] * p[:, 1:] - q[:, 1:], 0.0).sum(axis=-1)
    total = excess + 1.0 - inner
    # A zero total means ratio 1 and p = q, so that the next token is certainly accepted. A total is
    # NaN if a row of p is damaged. The next token is then drawn from this row, and reports it.
    inside = mx.where(total > 0, excess / mx.where(total > 0, total, 1.0), inner > 0)
    return mx.concatenate([inside, ratios[:, n:]], axis=1)


def block(log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
    """Accept the longest prefix whose joint test succeeds. This is exact; `delta` is not used.

    `_sampled` names the noise that it uses."""

    def judge(p: mx.array, q: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
        n = proposal.size
        order = mx.arange(1, n + 1)
        ratios = joint_ratios(p, q, proposal.tokens)
        passed = uniforms < block_accept_probabilities(p, q, ratios)
        length = mx.max(mx.where(passed, order, 0), axis=-1, keepdims=True)
        return order <= length, correction(p, q, ratios[:, :n])

    return _sampled(log_p, proposal, noise, judge)


Judge = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
"""A function of p and q, (batch, n, vocabulary) probabilities, and of (batch, n) uniform numbers in
[0, 1). It returns the accepted tokens, (batch, n) bool, and the distributions of the correction
token after 0 .. n - 1 accepted tokens, (batch, n, vocabulary)."""


def _sampled(log_p: mx.array, proposal: Proposal, noise: Noise, judge: Judge) -> Verdict:
    """Verify a proposal by sampling both acceptance and the correction token.

    It uses `noise.accept` and `noise.correction`, and needs the distributions of the draft tokens,
    or one-hot proposals. At temperature 0, use `coupled`."""
    p = mx.softmax(log_p.astype(mx.float32), axis=-1)
    n = proposal.size
    if n == 0:
        none = mx.zeros((len(p), 0), dtype=mx.bool_)
        return Verdict(none, draw(mx.log(p[:, 0]), noise.correction()))
    q = draft_probabilities(proposal, p.shape[-1])
    uniforms = noise.accept(n)
    assert uniforms is not None, "there is no noise at temperature 0"
    accepted, corrections = judge(p[:, :n], q, uniforms)
    after = mx.concatenate([corrections, p[:, n:]], axis=1)
    return Verdict(accepted, draw(mx.log(row_after(after, accepted)), noise.correction()))


def threshold(p: mx.array, epsilon: float, alpha: float) -> mx.array:
    """Return min(epsilon, alpha exp(-H(p))), (...) in the dtype of p, with the entropy H in nats.
    p: (..., vocabulary) probabilities."""
    entropy = -mx.sum(mx.where(p > 0, p * mx.log(mx.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return mx.minimum(alpha * mx.exp(-entropy), epsilon)


def typical(
    log_p: mx.array,
    proposal: Proposal,
    noise: Noise,
    delta: float,
    *,
    epsilon: float,
    alpha: float,
) -> Verdict:
    """Accept tokens whose target probability exceeds `threshold`. This is lossy.

    The next token is drawn from the target, or is its argmax at temperature 0. The test uses the
    target's sampling distribution p, or at temperature 0 its softmax. If alpha < 1, the most likely
    token always passes, since its probability is at least exp(-H). The rule uses
    `noise.correction`, and neither q nor `delta`."""
    rows = log_p.astype(mx.float32)
    p = mx.softmax(rows[:, : proposal.size], axis=-1)
    drafted = entries(p, proposal.tokens)
    accepted = leading(drafted > threshold(p, epsilon, alpha))
    return Verdict(accepted, draw(row_after(rows, accepted), noise.correction()))
