"""How fast drafting should be, from acceptance and costs: S(gamma). Plain numbers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def predicted_speed_ups(
    acceptance: Sequence[float],
    draft: float,
    passes: Callable[[int], float],
    other: float,
    lengths: Sequence[int] = (),
) -> tuple[float, ...]:
    """S(gamma) for gamma = 1 .. len(acceptance), without replays:
    (1 + a_1 + .. + a_gamma) / (gamma c + V(gamma + 1) + o).

    draft, passes, other: c, V and o in plain steps. lengths: tokens of the texts, which cut their
    last rounds short; without them texts have no end.
    """
    speeds = []
    for gamma in range(1, len(acceptance) + 1):
        if lengths:
            rounds = expected_rounds(acceptance[:gamma], max(lengths))
            emitted = sum(lengths) / sum(rounds[length] for length in lengths)
        else:
            emitted = 1.0 + sum(acceptance[:gamma])
        speeds.append(emitted / (gamma * draft + passes(gamma + 1) + other))
    return tuple(speeds)


def expected_rounds(acceptance: Sequence[float], longest: int) -> list[float]:
    """Entry n: how many rounds a text of n tokens takes, for n = 0 .. longest.

    acceptance: a_1 .. a_gamma, the same in every round, which then emits k + 1 tokens with
    probability a_k - a_(k + 1), a_0 being 1.
    """
    shares = [1.0, *acceptance, 0.0]
    chances = [shares[kept] - shares[kept + 1] for kept in range(len(acceptance) + 1)]
    rounds = [0.0]
    for length in range(1, longest + 1):
        after = (chance * rounds[max(0, length - kept - 1)] for kept, chance in enumerate(chances))
        rounds.append(1.0 + sum(after))
    return rounds


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
