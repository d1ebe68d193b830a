"""Which layers of a model and which passes are measured, and what follows for all layers."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from ..interfaces import Progress, ignore_progress
from ..models.outline import Outline
from .passes import Clock, PassCosts, PassTimer

FIRST_SIZES = (1, 2, 3, 5, 9, 17)
"""Tokens of the passes that are measured first, the shortest ones before the others."""
SIZES_BETWEEN = (4, 6, 7, 8, 11, 13)
"""Those that follow; what lies between is taken from its neighbours."""
NEEDED = 3
"""Tokens of the longest pass without which there is no answer."""
ALONE = 2
"""Turns in which only the first sizes are measured: one warms up, the other is the first answer."""
WHOLE = 1 << 30
"""Bytes of weights up to which all layers are measured."""
LEAST = 128 << 20
"""Bytes of the layers of the smaller part, and half the bytes by which the parts differ: too much
for a processor's cache to hold, so that each pass reads memory as the whole model's passes do."""
SHARE = 5
"""The parts differ by at least one layer in so many of the rest: a line through two depths carries
the noise of their times as many times farther as it goes on."""
WORTHWHILE = 0.6


def measure(
    timers: Sequence[PassTimer],
    *,
    turns: int,
    deadline: float,
    clock: Clock = time.perf_counter,
    progress: Progress = ignore_progress,
) -> None:
    """Time every kind of pass once a turn, all models in turns, so that a drift meets all of them.

    turns: after a first one, which warms up. deadline: the clock's time before which everything
    that begins should end. Without the passes that an answer needs nothing else is measured.
    """
    kinds = list(dict.fromkeys(kind for timer in timers for kind in timer.kinds))
    total = (turns + 1) * len(kinds)
    idle = 0
    for done in range(total):
        if idle == len(kinds):
            break  # what did not fit before will not later
        progress(done, total)
        turn, kind = done // len(kinds), kinds[done % len(kinds)]
        if kind[0] == "pass" and kind[1] in SIZES_BETWEEN and turn < ALONE:
            continue
        those = [timer for timer in timers if kind in timer.kinds]
        needs = turn == 0 and (kind[0] != "pass" or kind[1] <= NEEDED)
        if clock() + sum(timer.expected(kind) for timer in those) <= deadline:
            for timer in those:
                timer.time(kind)
            idle = 0
        elif needs:
            break
        else:
            idle += 1
    progress(total, total)


def parts(outline: Outline, whole: int = WHOLE, least: int = LEAST) -> tuple[int, int] | None:
    """Two depths to measure a model at, or None where it is measured whole.

    Both hold the same whole number of repeats of the model's pattern of layers behind its first,
    irregular ones. whole, least: see WHOLE and LEAST.
    """
    depth = len(outline.layers)
    if outline.nbytes <= whole or depth < 3:
        return None
    irregular, period = pattern(outline.layers)
    weights = outline.layer_nbytes
    first = _reach(weights, irregular, irregular + period, period, least)
    apart = max(2, -(-(depth - first) // (SHARE * period))) * period
    second = _reach(weights, first, first + apart, period, 2 * least)
    return (first, second) if second <= WORTHWHILE * depth else None


def pattern(layers: Sequence[Hashable]) -> tuple[int, int]:
    """(irregular, period): layer i looks like layer i + period for every i >= irregular.

    The pair with the smallest sum; without a pattern (0, number of layers).
    """
    count = len(layers)
    best = (0, count)
    for period in range(1, count):
        irregular = count - period
        while irregular > 0 and layers[irregular - 1] == layers[irregular - 1 + period]:
            irregular -= 1
        if irregular + period < sum(best):
            best = (irregular, period)
    return best


def extrapolate(few: float, more: float, depths: tuple[int, int], depth: int) -> float:
    """Seconds of `depth` layers, on the line through those measured at two depths.

    What does not depend on the depth (embedding, head) is the line's value at 0. Noise may give a
    line that falls; seconds then stay at what the deeper model took.
    """
    first, second = depths
    slope = max(0.0, (more - few) / (second - first))
    return max(few, more) + slope * (depth - second)


def extended(few: PassCosts, more: PassCosts, depths: tuple[int, int], depth: int) -> PassCosts:
    """Times of `depth` layers from those measured at two depths; see `extrapolate`."""

    def line(first: float | None, second: float | None) -> float:
        return extrapolate(first or 0.0, second or 0.0, depths, depth)

    return PassCosts(
        draft=line(few.draft, more.draft),
        passes={m: line(few.passes[m], s) for m, s in more.passes.items() if m in few.passes},
        start=line(few.start, more.start),
        step=line(few.step, more.step),
        replays=more.replays,
        samples=min(few.samples, more.samples),
        spread=max(few.spread, more.spread),
    )


def _reach(weights: Sequence[int], begin: int, end: int, period: int, least: int) -> int:
    """The first of end, end + period, ... at which the layers from `begin` on weigh `least`."""
    while end < len(weights) and sum(weights[begin:end]) < least:
        end += period
    return end
