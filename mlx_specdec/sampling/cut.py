"""How close the filters came to cutting elsewhere, so that another token would have been chosen.

A choice depends on rounding in two ways: which of the tokens that passed is best, and which passed.
`choices.margin` knows the first, this module the second, in the same unit: the change of one
log-probability relative to another. Top-p compares masses; the unit of these is their log-odds,
which no such change of log-probabilities moves by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from .choices import without
from .settings import Sampling


@dataclass(frozen=True)
class Cut:
    """What the filters of one sequence cut from, and what drew; nothing is computed from it yet.

    before: (1, rows, vocabulary) log p up to a constant, before top-k, top-p and min-p. gumbel:
    (1, rows, vocabulary), added to what passed.
    """

    before: mx.array
    gumbel: mx.array
    settings: Sampling

    def first(self, rows: int) -> Cut:
        """The same of the first rows alone."""
        if self.before.shape[1] == rows:
            return self
        return Cut(self.before[:, :rows], self.gumbel[:, :rows], self.settings)


def cut_margin(scored: mx.array, cut: Cut) -> mx.array:
    """The least change that makes the chosen token fall out, or one come in that would be chosen.

    scored: (1, rows, vocabulary), log p + g, -inf where a filter dropped the token. Returns
    (1, rows) float32, infinite where no change does. It is never more than the least change, and
    less only where several tokens near the cut would have to change places.
    """
    settings, before = cut.settings, cut.before
    kept = scored > -mx.inf
    dropped = mx.where(kept, -mx.inf, before)
    least = mx.min(mx.where(kept, before, mx.inf), axis=-1, keepdims=True)
    chosen = mx.argmax(scored, axis=-1, keepdims=True)
    own = mx.take_along_axis(before, chosen, axis=-1)
    stays, enters = mx.array(mx.inf), mx.array(-mx.inf)
    top = before
    if 0 < settings.top_k < before.shape[-1]:
        smallest = least
        if settings.top_p < 1 or settings.min_p > 0:
            top = mx.topk(before, settings.top_k, axis=-1)
            smallest = mx.min(top, axis=-1, keepdims=True)
        stays = own - mx.max(dropped, axis=-1, keepdims=True)
        enters = smallest - dropped
    if settings.top_p < 1:
        falls_out, next_in = _top_p(top, least, own, settings.top_p)
        stays = mx.minimum(own - mx.max(dropped, axis=-1, keepdims=True), falls_out)
        enters = mx.maximum(enters, mx.minimum(least - dropped, next_in))
    if settings.min_p > 0:
        slack = math.log(settings.min_p)
        others = mx.max(without(before, chosen), axis=-1, keepdims=True)
        stays = mx.minimum(stays, own - (others + slack))
        enters = mx.maximum(enters, mx.max(before, axis=-1, keepdims=True) + slack - dropped)
    behind = mx.max(scored, axis=-1, keepdims=True) - (dropped + cut.gumbel)
    rivals = mx.min(mx.maximum(enters, behind), axis=-1, keepdims=True)
    return mx.maximum(mx.minimum(stays, rivals), 0.0)[..., 0]


def _top_p(top: mx.array, least: mx.array, own: mx.array, p: float) -> tuple[mx.array, mx.array]:
    """Until the token of log p `own` falls out, and until the best that top-p dropped comes in.

    top: (1, rows, n), what top-p was given. least: of what passed. Returns (1, rows, 1) each.
    """
    best = mx.max(top, axis=-1, keepdims=True)
    mass = mx.exp(top - best)
    inside = mx.sum(mass * (top >= least), axis=-1, keepdims=True)
    outside = mx.sum(mass * (top < least), axis=-1, keepdims=True)
    above = mx.sum(mass * (top > own), axis=-1, keepdims=True)
    odds = math.log(p) - math.log1p(-p)
    next_in = mx.log(inside) - mx.log(outside) - odds

    def missing(part: mx.array) -> mx.array:
        return odds - mx.log(part) + mx.log(inside + outside - part)

    # Either what is above it reaches p, or what is kept below it overtakes it first.
    lower = mx.where((top >= least) & (top < own), top, -mx.inf)
    below = own - mx.max(lower, axis=-1, keepdims=True)
    overtaken = mx.maximum(below, missing(mx.maximum(inside - mx.exp(own - best), 0.0)))
    return mx.minimum(missing(above), overtaken), next_in
