"""On how many layers a model is measured, and what follows for all of them. Builds nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..models.outline import Outline

WHOLE = 1 << 30
"""Bytes of weights up to which all layers are measured."""
LEAST = 128 << 20
"""Bytes of the layers of the smaller part, and half the bytes by which the parts differ: too much
for a processor's cache to hold, so that each pass reads memory as the whole model's passes do."""
SHARE = 5
"""The parts differ by at least one layer in so many of the rest: a line through two depths carries
the noise of their times as many times farther as it goes on."""
WORTHWHILE = 0.6


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


def _reach(weights: Sequence[int], begin: int, end: int, period: int, least: int) -> int:
    """The first of end, end + period, ... at which the layers from `begin` on weigh `least`."""
    while end < len(weights) and sum(weights[begin:end]) < least:
        end += period
    return end
