"""Bias, penalties, top-k, top-p, min-p and XTC: what changes logits, as pure functions on arrays.

Every array is (..., vocabulary); what is filtered away has -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx

from .settings import Sampling

WIDE = 1 << 14
"""Tokens from which on sorting all of them takes longer than finding those to sort; measured."""


def fit_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """Cut logits to `vocabulary` entries, or fill up with -inf: the tail gets no probability."""
    width = logits.shape[-1]
    if width == vocabulary:
        return logits
    if width > vocabulary:
        return logits[..., :vocabulary]
    tail = mx.full((*logits.shape[:-1], vocabulary - width), -mx.inf, dtype=logits.dtype)
    return mx.concatenate([logits, tail], axis=-1)


def allow_only(logits: mx.array, words: mx.array) -> mx.array:
    """-inf where a bit is 0. words: (..., n) uint32, a bit for each entry, the lowest one first."""
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(*words.shape[:-1], -1)[..., : logits.shape[-1]]
    return mx.where(allowed.astype(mx.bool_), logits, mx.array(-mx.inf, dtype=logits.dtype))


def apply_logit_bias(logits: mx.array, bias: Mapping[int, float]) -> mx.array:
    """Add `bias` to single entries, all of them ids of the vocabulary."""
    if not bias:
        return logits
    dense = mx.zeros((logits.shape[-1],), dtype=logits.dtype)
    dense[mx.array(list(bias))] = mx.array(list(bias.values()), dtype=logits.dtype)
    return logits + dense


def apply_penalties(logits: mx.array, counts: mx.array, settings: Sampling) -> mx.array:
    """Penalise tokens by how often each came before.

    counts: float32, broadcastable to logits: occurrences of each token before the row's position.
    """
    seen = counts > 0
    if settings.repetition_penalty != 1:
        penalty = settings.repetition_penalty
        scaled = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(seen, scaled, logits)
    if settings.presence_penalty != 0:
        logits = logits - settings.presence_penalty * seen.astype(logits.dtype)
    if settings.frequency_penalty != 0:
        logits = logits - settings.frequency_penalty * counts
    return logits


def keep_top_k(logits: mx.array, k: int) -> mx.array:
    """Keep the k largest entries of each row; entries equal to the k-th stay as well."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    smallest_kept = mx.min(mx.topk(logits, k, axis=-1), axis=-1, keepdims=True)
    return mx.where(logits < smallest_kept, -mx.inf, logits)


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """Keep the smallest set of most likely tokens whose probability reaches p; of those that are
    equally likely the first ones.

    Source: Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    if p >= 1:
        return logits
    if logits.shape[-1] >= WIDE:
        return _keep_top_p_of_few(logits, p)
    order = mx.argsort(-logits, axis=-1)
    probabilities = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept_in_order = before < p
    kept = mx.put_along_axis(mx.zeros(logits.shape, dtype=mx.bool_), order, kept_in_order, axis=-1)
    return mx.where(kept, logits, -mx.inf)


def _keep_top_p_of_few(logits: mx.array, p: float) -> mx.array:
    """The same without putting tokens in order that are so unlikely that all of them together are
    half of what may go; in most laws most are. Takes more operations, but less time for each."""
    best = mx.max(logits, axis=-1, keepdims=True)
    total = mx.sum(mx.exp(logits - best), axis=-1, keepdims=True)
    never = best + mx.log(total * ((1 - p) / (2 * logits.shape[-1])))
    rising = mx.sort(mx.where(logits < never, -mx.inf, logits), axis=-1)
    least, count = _least(rising, mx.exp(rising - best), p * total)
    least = mx.maximum(least, never)
    above, equal = logits > least, logits == least
    room = count - mx.sum(above, axis=-1, keepdims=True)
    dropped = (logits < least) | (equal & (mx.cumsum(equal, axis=-1) > room))
    return mx.where(dropped, -mx.inf, logits)


def keep_top_k_and_p(logits: mx.array, k: int, p: float) -> mx.array:
    """`keep_top_k`, then `keep_top_p`, without sorting more than k entries; those equal to the
    least that is kept stay as well."""
    if not (0 < k < logits.shape[-1] and p < 1):
        return keep_top_p(keep_top_k(logits, k), p)
    rising = mx.sort(mx.topk(logits, k, axis=-1), axis=-1)
    least, _ = _least(rising, mx.softmax(rising, axis=-1), mx.array(p))
    return mx.where(logits < least, -mx.inf, logits)


def _least(rising: mx.array, shares: mx.array, enough: mx.array) -> tuple[mx.array, mx.array]:
    """The least likely token that top-p keeps, and how many it keeps: (..., 1) each.

    rising, shares: (..., n) log p and p of the tokens, the likeliest last, up to a constant each.
    enough: the sum of shares that is to be reached.
    """
    above = mx.cumsum(shares, axis=-1, reverse=True) - shares
    # The likeliest has nothing above it; in a damaged row no comparison holds.
    kept = mx.maximum(mx.sum(above < enough, axis=-1, keepdims=True), 1)
    return mx.take_along_axis(rising, rising.shape[-1] - kept, axis=-1), kept


def keep_min_p(logits: mx.array, p: float) -> mx.array:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)."""
    if p <= 0:
        return logits
    best = mx.max(logits, axis=-1, keepdims=True)
    return mx.where(logits < best + math.log(p), -mx.inf, logits)


def exclude_top_choices(
    logits: mx.array, threshold: float, special: Sequence[int] = ()
) -> mx.array:
    """XTC: of the tokens more likely than the threshold keep the least likely one alone.

    special: ids that stay. A row with fewer than two such tokens stays as it is. Source: mlx-lm's
    and llama.cpp's filter of that name.
    """
    probabilities = mx.softmax(logits, axis=-1)
    above = mx.where(probabilities > threshold, probabilities, mx.inf)
    excluded = probabilities > mx.min(above, axis=-1, keepdims=True)
    if special:
        excluded[..., mx.array(list(special))] = False
    return mx.where(excluded, -mx.inf, logits)
