"""Computes how far a choice is from the cuts of top-k, top-p and min-p.

Top-p compares masses, by their log-odds. No change of a log-probability moves them by more."""

import math

import mlx.core as mx

from ..largest import largest
from ..sampling.settings import Sampling


def cut_distance(
    scored: mx.array, before: mx.array, gumbel: mx.array, settings: Sampling
) -> mx.array:
    """Return the least change that excludes the chosen token, or lets another token be chosen.

    Args:
        scored: (..., rows, vocabulary), log p + g, -inf if a filter dropped the token.
        before: (..., rows, vocabulary), log p up to a constant, before the filters were applied.
        gumbel: The noise that was added to the tokens that passed.
        settings: top_k, top_p and min_p.
    Returns:
        (..., rows) float32, infinite if no change does so. It is a lower bound, which is exact
        unless several tokens near the cut would have to change places.
    """
    passed = scored > -mx.inf
    dropped = mx.where(passed, -mx.inf, before)
    least = mx.min(mx.where(passed, before, mx.inf), axis=-1, keepdims=True)
    chosen = mx.argmax(scored, axis=-1, keepdims=True)
    chosen_log_p = mx.take_along_axis(before, chosen, axis=-1)
    stays, enters = mx.array(mx.inf), mx.array(-mx.inf)
    top = before
    if 0 < settings.top_k < before.shape[-1]:
        smallest = least
        if settings.top_p < 1 or settings.min_p > 0:
            top = largest(before, settings.top_k)
            smallest = mx.min(top, axis=-1, keepdims=True)
        stays = chosen_log_p - mx.max(dropped, axis=-1, keepdims=True)
        enters = smallest - dropped
    if settings.top_p < 1:
        falls_out, next_in = _top_p(top, least, chosen_log_p, settings.top_p)
        stays = mx.minimum(chosen_log_p - mx.max(dropped, axis=-1, keepdims=True), falls_out)
        enters = mx.maximum(enters, mx.minimum(least - dropped, next_in))
    if settings.min_p > 0:
        slack = math.log(settings.min_p)
        without = mx.put_along_axis(before, chosen, mx.array(-mx.inf, dtype=before.dtype), axis=-1)
        rival = mx.max(without, axis=-1, keepdims=True)
        stays = mx.minimum(stays, chosen_log_p - (rival + slack))
        enters = mx.maximum(enters, mx.max(before, axis=-1, keepdims=True) + slack - dropped)
    behind = mx.max(scored, axis=-1, keepdims=True) - (dropped + gumbel)
    rivals = mx.min(mx.maximum(enters, behind), axis=-1, keepdims=True)
    return mx.maximum(mx.minimum(stays, rivals), 0.0)[..., 0]


def _top_p(
    top: mx.array, least: mx.array, chosen_log_p: mx.array, p: float
) -> tuple[mx.array, mx.array]:
    """Return two changes, shape (..., rows, 1): the first excludes the chosen token, and the second
    includes the best token that top-p dropped.

    Args:
        top: (..., rows, n), the input of top-p.
        least: The smallest log p that passed.
        chosen_log_p: The log p of the chosen token.
        p: The setting of top-p.
    """
    best = mx.max(top, axis=-1, keepdims=True)
    mass = mx.exp(top - best)
    inside = mx.sum(mass * (top >= least), axis=-1, keepdims=True)
    outside = mx.sum(mass * (top < least), axis=-1, keepdims=True)
    above = mx.sum(mass * (top > chosen_log_p), axis=-1, keepdims=True)
    odds = math.log(p) - math.log1p(-p)
    next_in = mx.log(inside) - mx.log(outside) - odds

    def missing(part: mx.array) -> mx.array:
        return odds - mx.log(part) + mx.log(inside + outside - part)

    # The chosen token drops out if the mass above it reaches p, or if tokens below overtake it.
    lower = mx.where((top >= least) & (top < chosen_log_p), top, -mx.inf)
    below = chosen_log_p - mx.max(lower, axis=-1, keepdims=True)
    overtaken = mx.maximum(below, missing(mx.maximum(inside - mx.exp(chosen_log_p - best), 0.0)))
    return mx.minimum(missing(above), overtaken), next_in
