"""The best draft length from what rounds cost, for acceptance probabilities that nobody knows."""

from __future__ import annotations

from ..costs.speedup import RoundCost, speedups
from .result import Prediction

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def chances(alpha: float, count: int) -> list[float]:
    """a_1 .. a_count where each token is accepted with probability alpha."""
    return [alpha**place for place in range(1, count + 1)]


def best(cost: RoundCost, alpha: float, longest: int) -> Prediction:
    """The length up to `longest` with the highest speedup, 0 where no length gains."""
    gains = speedups(cost, chances(alpha, longest))
    chosen = max(range(len(gains)), key=gains.__getitem__)
    return Prediction(alpha, chosen, gains[chosen])
