"""How little would have made each emitted token another one, computed many rows at a time.

That is how far it was above the second best in log p + g, or, where that is less, how close the
filters came to cutting elsewhere.

A few small operations a token are what plain decoding of a small model would notice, so rows wait
for each other, and nobody waits for the result before the sequence has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..errors import DecodingError
from ..sampling.choices import margin
from ..sampling.cut import Cut, cut_margin

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
    position: int
    cut: Cut | None

    @property
    def count(self) -> int:
        return self.scored.shape[1]


@dataclass(frozen=True)
class _Batch:
    margins: mx.array
    rows: Sequence[_Rows]


class Margins:
    """Takes rows in the order of their positions and tells `listener` their margins, later.

    `add` and `flush` raise DecodingError as soon as they see a row that is damaged.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._rows: list[_Rows] = []
        self._waiting = 0
        self._submitted: _Batch | None = None

    def add(self, scored: mx.array, count: int, position: int, cut: Cut | None = None) -> None:
        """The first `count` rows of `scored`, (1, rows, vocabulary), chose the tokens from
        `position` on; cut: of the same rows."""
        if count == 0:
            return
        part = None if cut is None else cut.first(count)
        rows = scored if scored.shape[1] == count else scored[:, :count]
        self._rows.append(_Rows(rows, position, part))
        self._waiting += count
        if self._waiting >= ROWS_AT_ONCE:
            self._tell()
            self._submit()

    def flush(self) -> None:
        """Tell everything; waits for it."""
        self._tell()
        if self._rows:
            self._submit()
            self._tell()

    def _submit(self) -> None:
        rows = sorted(self._rows, key=_filters)
        margins = [_margins(list(alike)) for _, alike in groupby(rows, key=_filters)]
        told = mx.concatenate(margins, axis=1)
        mx.async_eval(told)
        self._submitted = _Batch(told, rows)
        self._rows, self._waiting = [], 0

    def _tell(self) -> None:
        if self._submitted is None:
            return
        margins: Any = self._submitted.margins[0].tolist()
        if any(map(math.isnan, margins)):
            raise DecodingError(DAMAGED)
        first = 0
        for rows in self._submitted.rows:
            self._listener(margins[first : first + rows.count], rows.position)
            first += rows.count
        self._submitted = None


def _filters(rows: _Rows) -> int:
    """Equal for rows that went through the same filters."""
    return 0 if rows.cut is None else id(rows.cut.settings)


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
    nearest = cut_margin(scored, Cut(before, gumbel, cuts[0].settings))
    return mx.where(nearest < lead, nearest, lead)
