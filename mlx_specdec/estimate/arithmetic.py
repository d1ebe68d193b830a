"""From costs to speed-ups, and from a few layers to all of them. Plain numbers, no models.

The model of a round: S(gamma) = (sum over i = 0 .. gamma of alpha ** i) / (gamma c + V(gamma + 1)
+ o + r), everything in plain decoding steps (Leviathan et al., arXiv 2211.17192, section 3, with a
measured V in the place of 1). Acceptance is taken to be the same at every position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Costs:
    """In plain steps of the target. draft: one draft step (c). passes: entry m - 1 is a pass over m
    tokens (V(m)). start: what the first pass of a round takes longer (o). replays: what is rejected
    costs a pass over the tokens that are kept."""

    draft: float
    passes: tuple[float, ...]
    start: float = 0.0
    replays: bool = False

    @property
    def most(self) -> int:
        """The longest draft that these costs tell about."""
        return len(self.passes) - 1


@dataclass(frozen=True)
class Prediction:
    """The best number of drafted tokens for one acceptance, 0 being plain decoding."""

    alpha: float
    num_draft: int
    speed_up: float


def emitted(alpha: float, gamma: int) -> float:
    """Expected tokens of a round of `gamma` drafted ones, the target's own included."""
    return sum(alpha**index for index in range(gamma + 1))


def round_cost(costs: Costs, alpha: float, gamma: int) -> float:
    """A round in plain steps; 1 for gamma = 0, which is a plain step."""
    if gamma == 0:
        return 1.0
    cost = gamma * costs.draft + costs.passes[gamma] + costs.start
    if costs.replays:
        # Where one was rejected, a pass over what stays.
        kept = round(_kept_if_rejected(alpha, gamma))
        cost += (1 - alpha**gamma) * costs.passes[kept]
    return cost


def speed_up(costs: Costs, alpha: float, gamma: int) -> float:
    """Tokens per second over plain decoding's, S(gamma)."""
    return emitted(alpha, gamma) / round_cost(costs, alpha, gamma)


def best(costs: Costs, alpha: float) -> Prediction:
    """The length with the highest speed-up, 0 where no length gains."""
    chosen = max(range(costs.most + 1), key=lambda gamma: speed_up(costs, alpha, gamma))
    return Prediction(alpha, chosen, speed_up(costs, alpha, chosen))


def extrapolate(few: float, more: float, depths: tuple[int, int], depth: int) -> float:
    """Seconds of `depth` layers, on the line through those measured at two depths.

    What does not depend on the depth (embedding, head) is the line's value at 0. Noise may give a
    line that falls; seconds then stay at what the deeper model took.
    """
    first, second = depths
    slope = max(0.0, (more - few) / (second - first))
    return max(few, more) + slope * (depth - second)


def between(points: Mapping[int, float], count: int) -> tuple[float, ...]:
    """Values at 1 .. count, those not among the points on straight lines between their neighbours.

    points: must have 1 and something at or beyond `count`.
    """
    known = sorted(points)
    return tuple(_at(points, known, place) for place in range(1, count + 1))


def _at(points: Mapping[int, float], known: Sequence[int], place: int) -> float:
    above = known[bisect_left(known, place)]
    if above == place:
        return points[place]
    below = known[known.index(above) - 1]
    share = (place - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def _kept_if_rejected(alpha: float, gamma: int) -> float:
    """Expected number of accepted tokens in rounds where not all were."""
    chances = [alpha**index * (1 - alpha) for index in range(gamma)]
    total = sum(chances)
    return sum(i * chance for i, chance in enumerate(chances)) / total if total else 0.0
