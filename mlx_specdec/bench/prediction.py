"""How fast drafting should be, from acceptance and costs: S(gamma). Plain numbers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def predicted_speed_ups(
    acceptance: Sequence[float], draft: float, passes: Callable[[int], float], other: float
) -> tuple[float, ...]:
    """S(gamma) for gamma = 1 .. len(acceptance), without replays:
    (1 + a_1 + .. + a_gamma) / (gamma c + V(gamma + 1) + o).

    draft, passes, other: c, V and o in plain steps.
    """
    speeds, emitted = [], 1.0
    for gamma, accepted in enumerate(acceptance, start=1):
        emitted += accepted
        speeds.append(emitted / (gamma * draft + passes(gamma + 1) + other))
    return tuple(speeds)


def between(points: Mapping[int, float]) -> Callable[[int], float]:
    """The straight lines through the points, the last one going on."""
    known = sorted(points)

    def at(place: int) -> float:
        above = next((one for one in known[1:] if one >= place), known[-1])
        below = known[max(0, known.index(above) - 1)]
        if above == below:
            return points[below]
        share = (place - below) / (above - below)
        return points[below] + share * (points[above] - points[below])

    return at
