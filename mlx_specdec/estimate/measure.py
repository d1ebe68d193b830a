"""In which order, and for how long, the passes of several models are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..contracts import Progress
from ..costs.passes import Clock, Kind, PassTimer

FIRST_SIZES = (1, 2, 3, 5, 9, 17)
"""Tokens of the passes that are measured first, the shortest ones before the others."""
SIZES_BETWEEN = (4, 6, 7, 8, 11, 13)
"""Those that follow; what lies between is taken from its neighbours."""
NEEDED = 3
"""Tokens of the longest pass without which there is no answer, however long it takes."""
ALONE = 2
"""Turns in which only the first sizes are measured: one warms up, the other is the first answer."""


def measure(
    timers: Sequence[PassTimer],
    *,
    turns: int,
    deadline: float,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> None:
    """Time every kind of pass once a turn, all models in turns, so that a drift meets all of them.

    turns: after a first one, which warms up. deadline: the clock's time after which nothing begins
    but what an answer needs, and before which everything that begins should end.
    """
    kinds = list(dict.fromkeys(kind for timer in timers for kind in timer.kinds))
    total = (turns + 1) * len(kinds)
    for done in range(total):
        if progress is not None:
            progress(done, total)
        turn, kind = done // len(kinds), kinds[done % len(kinds)]
        if kind[0] == "pass" and kind[1] in SIZES_BETWEEN and turn < ALONE:
            continue
        those = [timer for timer in timers if kind in timer.kinds]
        needs = turn == 0 and _needed(kind)
        if needs or clock() + sum(timer.expected(kind) for timer in those) <= deadline:
            for timer in those:
                timer.time(kind)
    if progress is not None:
        progress(total, total)


def _needed(kind: Kind) -> bool:
    return kind[0] != "pass" or kind[1] <= NEEDED
