"""By how much each emitted token led the second best, computed many rows at a time.

Knows rows of log p + g and positions. Knows nothing of rules. A few small operations a token are
what plain decoding of a small model would notice, so rows wait for each other, and nobody waits
for the result before the text has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..sampling.law import lead

ROWS_AT_ONCE = 16

Listener = Callable[[list[float], int], None]
"""Called with the leads of neighbouring positions and the first of these."""


@dataclass(frozen=True)
class _Batch:
    leads: mx.array
    spans: tuple[tuple[int, int], ...]


class Margins:
    """Takes rows in the order of their positions and tells `listener` their leads, later."""

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
        leads = lead(mx.concatenate(self._rows, axis=1))
        mx.async_eval(leads)
        self._submitted = _Batch(leads, tuple(self._spans))
        self._rows, self._spans, self._waiting = [], [], 0

    def _tell(self) -> None:
        if self._submitted is None:
            return
        leads: Any = self._submitted.leads[0].tolist()
        first = 0
        for position, count in self._submitted.spans:
            self._listener(leads[first : first + count], position)
            first += count
        self._submitted = None
