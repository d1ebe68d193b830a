"""Confidence intervals of a speedup, by drawing sequences again. Plain numbers only.

Plain decoding and the other method were measured side by side on the same prompt, so they are drawn
together, and what slowed both cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
COVERAGE = 0.95
FEWEST = 5
"""Sequences below which there is no interval: drawing so few again says next to nothing."""


class Paired(NamedTuple):
    """One sequence by plain decoding and by another method; seconds: the medians of repeats."""

    plain_seconds: float
    seconds: float
    plain_tokens: int
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """A figure, and the interval that holds it with 95 % confidence, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """In words; empty where there is none."""
        none = self.low is None or self.high is None
        return "" if none else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class SpeedUp:
    """overall: tokens per second over plain decoding's, all sequences taken together. per_text:
    the median over the sequences of the same ratio."""

    overall: Estimate
    per_text: Estimate


def speed_up(texts: Sequence[Paired], draws: int = DRAWS, seed: int = 0) -> SpeedUp | None:
    """Ratio to plain decoding with its interval; None without sequences that took any time.

    The interval comes from drawing, `draws` times, as many sequences as there are (Efron's
    percentiles).
    """
    texts = [text for text in texts if min(text) > 0]
    if not texts:
        return None
    count = len(texts)
    plain_seconds, seconds, plain_tokens, tokens = np.array(texts, dtype=float).T
    drawn = np.random.default_rng(seed).integers(0, count, (draws, count))
    # Row 0 is what was measured.
    drawn = np.concatenate([np.arange(count)[None], drawn])
    speed, plain_speed = (
        made[drawn].sum(axis=1) / took[drawn].sum(axis=1)
        for made, took in ((tokens, seconds), (plain_tokens, plain_seconds))
    )
    ratios = (tokens / seconds) / (plain_tokens / plain_seconds)
    per_text = np.median(ratios[drawn], axis=1)
    return SpeedUp(_estimate(speed / plain_speed, count), _estimate(per_text, count))


def _estimate(ratios: NDArray[np.float64], count: int) -> Estimate:
    """ratios: as measured, then as drawn."""
    value = float(ratios[0])
    if count < FEWEST:
        return Estimate(value)
    tail = (1 - COVERAGE) / 2 * 100
    low, high = np.percentile(ratios[1:], [tail, 100 - tail])
    return Estimate(value, float(low), float(high))
