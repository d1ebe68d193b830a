"""How far each emitted token was above the second best, computed many rows at a time.

A few small operations a token are what plain decoding of a small model would notice, so rows wait
for each other, and nobody waits for the result before the sequence has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import DecodingError
from ..sampling.distribution import margin

ROWS_AT_ONCE = 16
DAMAGED = (
    "the model's logits are not numbers (NaN or infinite): its weights are damaged, or its "
    "precision is too low for them; try --dtype float32"
)

Listener = Callable[[list[float], int], None]
"""Called with the margins of neighbouring positions and the first of these; a margin is infinite
where there was no second candidate."""


@dataclass(frozen=True)
class _Batch:
    margins: mx.array
    spans: tuple[tuple[int, int], ...]


class Margins:
    """Takes rows in the order of their positions and tells `listener` their margins, later.

    `add` and `flush` raise DecodingError as soon as they see a row that is damaged.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._rows: list[mx.array] = []
        self._spans: list[tuple[int, int]] = []
        self._waiting = 0
        self._submitted: _Batch | None = None

    def add(self, scored: mx.array, count: int, position: int) -> None:
        """The first `count` rows of `scored`, (1, rows, vocabulary), chose the tokens from
        `position` on."""
        if count == 0:
            return
        self._rows.append(scored[:, :count])
        self._spans.append((position, count))
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
        margins = margin(mx.concatenate(self._rows, axis=1))
        mx.async_eval(margins)
        self._submitted = _Batch(margins, tuple(self._spans))
        self._rows, self._spans, self._waiting = [], [], 0

    def _tell(self) -> None:
        if self._submitted is None:
            return
        margins: Any = self._submitted.margins[0].tolist()
        if any(map(math.isnan, margins)):
            raise DecodingError(DAMAGED)
        first = 0
        for position, count in self._submitted.spans:
            self._listener(margins[first : first + count], position)
            first += count
        self._submitted = None
