"""How close the filters came to cutting elsewhere, so that another token would have been chosen.

A choice depends on rounding in two ways: which of the tokens that passed is best, and which passed.
`distribution.margin` knows the first, this module the second, in the same unit: the change of one
log-probability relative to another. Top-p compares masses; the unit of these is their log-odds,
which no such change of log-probabilities moves by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..errors import DecodingError
from ..interfaces.results import Cut
from ..sampling.distribution import margin, without


def cut_margin(scored: mx.array, cut: Cut) -> mx.array:
    """Return the least change that excludes the chosen token, or includes one that would be chosen.

    scored: (1, rows, vocabulary), log p + g, -inf where a filter dropped the token. Returns
    (1, rows) float32, infinite where no change does. It is never more than the least change, and
    less only where several tokens near the cut would have to change places.
    """
    before = cut.before
    passed = scored > -mx.inf
    dropped = mx.where(passed, -mx.inf, before)
    least = mx.min(mx.where(passed, before, mx.inf), axis=-1, keepdims=True)
    chosen = mx.argmax(scored, axis=-1, keepdims=True)
    own = mx.take_along_axis(before, chosen, axis=-1)
    stays, enters = mx.array(mx.inf), mx.array(-mx.inf)
    top = before
    if 0 < cut.top_k < before.shape[-1]:
        smallest = least
        if cut.top_p < 1 or cut.min_p > 0:
            top = mx.topk(before, cut.top_k, axis=-1)
            smallest = mx.min(top, axis=-1, keepdims=True)
        stays = own - mx.max(dropped, axis=-1, keepdims=True)
        enters = smallest - dropped
    if cut.top_p < 1:
        falls_out, next_in = _top_p(top, least, own, cut.top_p)
        stays = mx.minimum(own - mx.max(dropped, axis=-1, keepdims=True), falls_out)
        enters = mx.maximum(enters, mx.minimum(least - dropped, next_in))
    if cut.min_p > 0:
        slack = math.log(cut.min_p)
        others = mx.max(without(before, chosen), axis=-1, keepdims=True)
        stays = mx.minimum(stays, own - (others + slack))
        enters = mx.maximum(enters, mx.max(before, axis=-1, keepdims=True) + slack - dropped)
    behind = mx.max(scored, axis=-1, keepdims=True) - (dropped + cut.gumbel)
    rivals = mx.min(mx.maximum(enters, behind), axis=-1, keepdims=True)
    return mx.maximum(mx.minimum(stays, rivals), 0.0)[..., 0]


def _top_p(top: mx.array, least: mx.array, own: mx.array, p: float) -> tuple[mx.array, mx.array]:
    """Return the change that excludes the token of log p `own`, and the one that includes the best
    token that top-p dropped.

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

    # Either what is above it reaches p, or what passed below it overtakes it first.
    lower = mx.where((top >= least) & (top < own), top, -mx.inf)
    below = own - mx.max(lower, axis=-1, keepdims=True)
    overtaken = mx.maximum(below, missing(mx.maximum(inside - mx.exp(own - best), 0.0)))
    return mx.minimum(missing(above), overtaken), next_in


ROWS_AT_ONCE = 16
DAMAGED = (
    "the model's logits are not numbers (NaN or infinite): its weights are damaged, or its "
    "precision is too low for them; try --dtype float32"
)

Listener = Callable[[list[float], int], None]
"""Called with the margins of neighbouring positions and the first of these; a margin is infinite
where there was no second candidate."""


@dataclass(frozen=True)
class _Rows:
    """Rows that chose the tokens from `position` on."""

    scored: mx.array
    count: int
    position: int
    cut: Cut | None


class Margins:
    """Takes rows in the order of their positions and passes their margins to `listener`, later.

    `add` and `flush` raise DecodingError as soon as they see a row that is damaged.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._rows: list[_Rows] = []
        self._waiting = 0
        self._submitted: tuple[mx.array, list[_Rows]] | None = None

    def add(self, scored: mx.array, count: int, position: int, cut: Cut | None = None) -> None:
        """The first `count` rows of `scored`, (1, rows, vocabulary), chose the tokens from
        `position` on; cut: of the same rows."""
        if count == 0:
            return
        part = None if cut is None else cut.first(count)
        rows = scored if scored.shape[1] == count else scored[:, :count]
        self._rows.append(_Rows(rows, count, position, part))
        self._waiting += count
        if self._waiting >= ROWS_AT_ONCE:
            self._report()
            self._submit()

    def flush(self) -> None:
        self._report()
        if self._rows:
            self._submit()
            self._report()

    def _submit(self) -> None:
        rows = sorted(self._rows, key=_filters)
        margins = [_margins(list(alike)) for _, alike in groupby(rows, key=_filters)]
        joined = mx.concatenate(margins, axis=1)
        mx.async_eval(joined)
        self._submitted = joined, rows
        self._rows, self._waiting = [], 0

    def _report(self) -> None:
        if self._submitted is None:
            return
        submitted, rows = self._submitted
        margins: Any = submitted[0].tolist()
        if any(map(math.isnan, margins)):
            raise DecodingError(DAMAGED)
        first = 0
        for each in rows:
            self._listener(margins[first : first + each.count], each.position)
            first += each.count
        self._submitted = None


def _filters(rows: _Rows) -> int:
    """Equal for rows that went through the same filters."""
    return 0 if rows.cut is None else hash((rows.cut.top_k, rows.cut.top_p, rows.cut.min_p))


def _margins(rows: Sequence[_Rows]) -> mx.array:
    """(1, n) float32 of rows that went through the same filters."""
    scored = mx.concatenate([each.scored for each in rows], axis=1)
    lead = margin(scored)
    cuts = [each.cut for each in rows if each.cut is not None]
    if not cuts:
        return lead
    before = mx.concatenate([cut.before for cut in cuts], axis=1)
    gumbel = mx.concatenate([cut.gumbel for cut in cuts], axis=1)
    # NaN says that the row is damaged, and stays.
    nearest = cut_margin(scored, replace(cuts[0], before=before, gumbel=gumbel))
    return mx.where(nearest < lead, nearest, lead)
