"""The rules that decide which drafted tokens are accepted, and their arithmetic on arrays."""

import math
import random
from abc import ABC, abstractmethod

import mlx.core as mx

from ..interfaces import Noise, Proposal, Verdict
from ..sampling.distribution import choose


def leading(accepted: mx.array) -> mx.array:
    """(batch, n) bool -> (batch, n) bool: True up to, not including, the first False."""
    if accepted.shape[-1] == 0:
        return accepted
    return mx.cumprod(accepted.astype(mx.int32), axis=-1).astype(mx.bool_)


def row_after(rows: mx.array, accepted: mx.array) -> mx.array:
    """Return the row of each sequence after its accepted ones: (batch, n + 1, ...), (batch, n) bool
    -> (batch, ...)."""
    if accepted.shape[-1] == 0:
        return rows[:, 0]
    count = mx.sum(accepted, axis=-1, keepdims=True)
    index = count.reshape(count.shape + (1,) * (rows.ndim - 2))
    return mx.take_along_axis(rows, index, axis=1)[:, 0]


def entries(rows: mx.array, tokens: mx.array, outside: float = 0.0) -> mx.array:
    """The entry of each row at its token, `outside` for ids that rows do not have.

    rows: (batch, n, vocabulary); tokens: (batch, n) int32. Returns (batch, n)."""
    last = rows.shape[-1] - 1
    index = mx.minimum(tokens, last)[..., None]
    inside = mx.take_along_axis(rows, index, axis=-1)[..., 0]
    return mx.where(tokens > last, mx.array(outside, dtype=rows.dtype), inside)


def one_hot(tokens: mx.array, vocabulary: int, dtype: mx.Dtype) -> mx.array:
    """The distribution that puts everything on one token: (...) int32 -> (..., vocabulary)."""
    return (tokens[..., None] == mx.arange(vocabulary)).astype(dtype)


def draft_probabilities(proposal: Proposal, vocabulary: int) -> mx.array:
    """What the drafted tokens were drawn from, (batch, n, vocabulary) float32. A row is zero where
    it is damaged, empty, or one-hot on an id that the target does not have: rules then reject, and
    correct from p alone, which is exact."""
    if proposal.rows is None:
        return one_hot(proposal.tokens, vocabulary, mx.float32)
    q = mx.softmax(proposal.rows, axis=-1)
    return mx.where(q >= 0, q, 0.0)


def draw(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """Return the Gumbel-max choice of each row, and -1 if the maximum of a row is not finite.

    log_p: (..., vocabulary), up to a constant; gumbel: the same or None. Returns (...) int32."""
    finite = mx.isfinite(mx.max(log_p, axis=-1))
    return mx.where(finite, choose(log_p, gumbel), -1)


class Coupled:
    """Exact at every temperature. Reads no proposal rows."""

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """See Rule; `noise.target` is the noise that the draft was drawn with."""
        choice = draw(log_p, noise.target(proposal.size + 1))
        if proposal.size == 0:
            # A plain step: each operation less is time that plain decoding does not lose.
            return Verdict(proposal.none_accepted, choice.squeeze(1))
        accepted = leading(choice[:, : proposal.size] == proposal.tokens)
        return Verdict(accepted, row_after(choice, accepted))


class LenientGreedy:
    """Temperature 0 with delta > 0. Lossy: accepts x iff p(x) >= (1 - delta) max p.

    p is the softmax at temperature 1 of the penalised logits. delta = 0 is greedy matching, delta =
    1 accepts everything that is not banned, and acceptance never decreases with delta. A reading of
    Leviathan et al., arXiv 2211.17192, appendix A.5, with 1 - delta for its l."""

    def __init__(self, delta: float) -> None:
        self._slack = math.log1p(-delta) if delta < 1 else -math.inf

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """See Rule; draws nothing."""
        choice = draw(log_p, None)
        rows = log_p[:, : proposal.size]
        drafted = entries(rows, proposal.tokens, -mx.inf).astype(mx.float32)
        best = mx.max(rows, axis=-1).astype(mx.float32)
        passes = (drafted >= best + self._slack) & (drafted > -mx.inf)
        accepted = leading(passes | (choice[:, : proposal.size] == proposal.tokens))
        return Verdict(accepted, row_after(choice, accepted))


def accept_probabilities(
    p: mx.array, q: mx.array, tokens: mx.array, delta: float = 0.0
) -> mx.array:
    """min(1, p(x)/q(x) + delta) for each drafted token x, but 0 where p(x) or q(x) is 0.

    p, q: (batch, n, vocabulary) probabilities, any float dtype, which the result keeps; q may have
    rows of zeros. tokens: (batch, n) int32, drawn from q. Returns (batch, n)."""
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    possible = (p_x > 0) & (q_x > 0)
    ratio = p_x / mx.where(possible, q_x, 1.0)
    return mx.where(possible, mx.minimum(ratio + delta, 1.0), 0.0)


def correction(p: mx.array, q: mx.array, ratio: mx.array | None = None) -> mx.array:
    """The distribution of the token after an accepted prefix: (r p - q)+ normalized.

    p, q: (..., vocabulary) probabilities, any float dtype, which the result keeps. ratio: (...),
    the joint ratio r of the prefix, 1 if it is None. Returns p itself where nothing is left."""
    residual = mx.maximum((p if ratio is None else ratio[..., None] * p) - q, 0.0)
    mass = mx.sum(residual, axis=-1, keepdims=True)
    return mx.where(mass > 0, residual / mx.where(mass > 0, mass, 1.0), p)


class SampledRule(ABC):
    """What the rules share that draw whether to accept, and the correction.

    Needs the rows that the drafted tokens were drawn from, or one-hot. name: in messages."""

    name: str

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """See Rule; uses `noise.accept` and `noise.correction`."""
        p = mx.softmax(log_p.astype(mx.float32), axis=-1)
        n = proposal.size
        if n == 0:
            return Verdict(proposal.none_accepted, draw(mx.log(p[:, 0]), noise.correction()))
        q = draft_probabilities(proposal, p.shape[-1])
        uniforms = noise.accept(n)
        if uniforms is None:
            raise ValueError(
                f"the {self.name} rule draws random numbers; at temperature 0 use Coupled"
            )
        accepted, corrections = self.judge(p, q, proposal.tokens, uniforms)
        after = mx.concatenate([corrections, p[:, n:]], axis=1)
        return Verdict(accepted, draw(mx.log(row_after(after, accepted)), noise.correction()))

    @abstractmethod
    def judge(
        self, p: mx.array, q: mx.array, tokens: mx.array, uniforms: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return which drafted tokens are accepted, (batch, n) bool, and the distribution of the
        token after 0 .. n - 1 accepted ones, (batch, n, vocabulary).

        p: (batch, n + 1, vocabulary); q: (batch, n, vocabulary). uniforms: (batch, n)."""


class TokenRule(SampledRule):
    """Exact for delta = 0. Accepts tokens up to the first one that is rejected."""

    name = "token"

    def __init__(self, delta: float = 0.0) -> None:
        self._delta = delta

    def judge(
        self, p: mx.array, q: mx.array, tokens: mx.array, uniforms: mx.array
    ) -> tuple[mx.array, mx.array]:
        before = p[:, : tokens.shape[1]]
        accepted = leading(uniforms < accept_probabilities(before, q, tokens, self._delta))
        return accepted, correction(before, q)


def joint_ratios(p: mx.array, q: mx.array, tokens: mx.array) -> mx.array:
    """r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i)).

    p, q: (batch, n, vocabulary) probabilities; tokens: (batch, n) int32. Returns (batch, n + 1) in
    the dtype of p, 0 from the first token on for which p or q is 0."""
    p_x, q_x = entries(p, tokens), entries(q, tokens)
    p_x, q_x = mx.where(q_x > 0, p_x, 0.0), mx.where(q_x > 0, q_x, 1.0)
    ratios = [mx.ones_like(p_x[:, 0])]
    for column in range(tokens.shape[1]):
        ratios.append(mx.minimum(ratios[-1] * p_x[:, column] / q_x[:, column], 1.0))
    return mx.stack(ratios, axis=1)


def block_accept_probabilities(p: mx.array, q: mx.array, tokens: mx.array) -> mx.array:
    """h_i, the probability that drafted token i ends the accepted prefix unless a later one does.

    p: (batch, n + 1, vocabulary), the last row the bonus token's; q: (batch, n, vocabulary).
    Returns (batch, n) in the dtype of p."""
    n = tokens.shape[1]
    ratios = joint_ratios(p[:, :n], q, tokens)
    inner = ratios[:, 1:n]
    excess = mx.maximum(inner[..., None] * p[:, 1:n] - q[:, 1:], 0.0).sum(axis=-1)
    total = excess + 1.0 - inner
    # Nothing in excess at ratio 1 means p = q: then the next token is accepted for certain.
    inside = mx.where(total > 0, excess / mx.where(total > 0, total, 1.0), 1.0)
    return mx.concatenate([inside, ratios[:, n:]], axis=1)


class BlockRule(SampledRule):
    """Exact. Accepts the longest prefix whose joint test succeeds, not up to the first failure."""

    name = "block"

    def judge(
        self, p: mx.array, q: mx.array, tokens: mx.array, uniforms: mx.array
    ) -> tuple[mx.array, mx.array]:
        n = tokens.shape[1]
        passed = uniforms < block_accept_probabilities(p, q, tokens)
        order = mx.arange(1, n + 1)
        length = mx.max(mx.where(passed, order, 0), axis=-1, keepdims=True)
        ratios = joint_ratios(p[:, :n], q, tokens)
        return order <= length, correction(p[:, :n], q, ratios[:, :n])


def threshold(p: mx.array, epsilon: float, alpha: float) -> mx.array:
    """min(eps, alpha exp(-H(p))) with the entropy H in nats.

    p: (..., vocabulary) probabilities, any float dtype, which the result keeps. Returns (...)."""
    entropy = -mx.sum(mx.where(p > 0, p * mx.log(mx.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return mx.minimum(alpha * mx.exp(-entropy), epsilon)


class TypicalRule:
    """Lossy. The token after the accepted ones is the target's own: drawn, or its best at
    temperature 0.

    p is what tokens are drawn from; at temperature 0 the softmax at temperature 1. With alpha < 1
    the target's likeliest token always passes, since its probability is at least exp(-H)."""

    def __init__(self, epsilon: float, alpha: float) -> None:
        self._epsilon = epsilon
        self._alpha = alpha

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """See Rule; uses `noise.correction`, and no rows of the proposal."""
        rows = log_p.astype(mx.float32)
        p = mx.softmax(rows[:, : proposal.size], axis=-1)
        drafted = entries(p, proposal.tokens)
        accepted = leading(drafted > threshold(p, self._epsilon, self._alpha))
        return Verdict(accepted, draw(row_after(rows, accepted), noise.correction()))


class ForcedAcceptance:
    """Accepts each drafted token with the same probability, 0 .. 1, while those before it are
    accepted. The token after them is the target's own choice."""

    def __init__(self, probability: float, seed: int) -> None:
        self._probability = probability
        self._random = random.Random(seed)

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """See Rule, except that the proposal's tokens are not looked at."""
        choice = draw(log_p, noise.target(proposal.size + 1))
        if proposal.size == 0:
            return Verdict(proposal.none_accepted, choice.squeeze(1))
        stays = [self._random.random() < self._probability for _ in range(proposal.size)]
        accepted = leading(mx.array([stays]))
        return Verdict(accepted, row_after(choice, accepted))
