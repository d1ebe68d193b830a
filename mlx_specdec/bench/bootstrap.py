"""Confidence intervals of a speedup, by drawing sequences and repeats again.

Plain numbers only. Plain decoding and the other method were measured side by side on the same
prompt in the same repeat, so they are drawn together, and what slowed both cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
COVERAGE = 0.95
FEWEST = 5
"""Sequences below which there is no interval: drawing so few again says next to nothing."""


@dataclass(frozen=True)
class Paired:
    """One sequence by plain decoding and by another method, once per repeat.

    plain_seconds, seconds: entry r is repeat r. plain_tokens, tokens: how many were made in them.
    """

    plain_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    plain_tokens: int
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """A figure, and the interval that holds it with 95 % confidence, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SpeedUp:
    """overall: tokens per second over plain decoding's, all sequences taken together. per_text:
    the median over the sequences of the same ratio."""

    overall: Estimate
    per_text: Estimate


def speed_up(texts: Sequence[Paired], draws: int = DRAWS, seed: int = 0) -> SpeedUp | None:
    """Ratio to plain decoding with its interval; None without sequences that took any time.

    Each sequence counts with the median of its repeats. The interval comes from drawing, `draws`
    times, as many sequences as there are, and of each as many repeats as it has (Efron's
    percentiles).
    """
    texts = [text for text in texts if _counts(text)]
    if not texts:
        return None
    repeats = np.array([len(text.seconds) for text in texts])
    count, width = len(texts), int(repeats.max())
    random = np.random.default_rng(seed)
    drawn = random.integers(0, count, (draws, count))
    # Row 0 is what was measured.
    drawn = np.concatenate([np.arange(count)[None], drawn])
    shares = random.random((draws, count, width))
    picked = (shares * repeats[drawn[1:]][..., None]).astype(np.int64)
    picked = np.concatenate([np.tile(np.arange(width), (1, count, 1)), picked])
    beyond = np.arange(width) >= repeats[drawn][..., None]

    def medians(seconds: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
        table = np.array([[*each, *[0.0] * (width - len(each))] for each in seconds])
        at = np.minimum(picked, repeats[drawn][..., None] - 1)
        return np.nanmedian(np.where(beyond, np.nan, table[drawn[..., None], at]), axis=2)

    plain, other = medians([t.plain_seconds for t in texts]), medians([t.seconds for t in texts])
    plain_tokens = np.array([text.plain_tokens for text in texts], dtype=float)[drawn]
    tokens = np.array([text.tokens for text in texts], dtype=float)[drawn]
    overall = plain.sum(1) / plain_tokens.sum(1) * tokens.sum(1) / other.sum(1)
    per_text = np.median(plain / plain_tokens * tokens / other, axis=1)
    return SpeedUp(_estimate(overall, count), _estimate(per_text, count))


def _estimate(ratios: NDArray[np.float64], count: int) -> Estimate:
    """ratios: as measured, then as drawn."""
    value = float(ratios[0])
    if count < FEWEST:
        return Estimate(value)
    tail = (1 - COVERAGE) / 2 * 100
    low, high = np.percentile(ratios[1:], [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def _counts(text: Paired) -> bool:
    seconds = *text.plain_seconds, *text.seconds
    return bool(text.tokens and text.plain_tokens and seconds and min(seconds) > 0)
