"""Confidence intervals of a speed-up, by drawing prompts and repeats again.

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


@dataclass(frozen=True)
class Paired:
    """One text by plain decoding and by another method, once per repeat.

    plain_seconds, seconds: entry r is repeat r. plain_tokens, tokens: how many were made in them.
    """

    plain_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    plain_tokens: int
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """A figure, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SpeedUp:
    """overall: tokens per second over plain decoding's, all texts taken together. per_text: the
    median over the texts of the same ratio."""

    overall: Estimate
    per_text: Estimate


def speed_up(texts: Sequence[Paired], draws: int = DRAWS, seed: int = 0) -> SpeedUp | None:
    """Ratio to plain decoding with its interval; None without texts that took any time.

    Each text counts with the median of its repeats. The interval comes from drawing, `draws`
    times, as many texts as there are, and of each as many repeats as it has (Efron's percentiles).
    """
    texts = [text for text in texts if _counts(text)]
    if not texts:
        return None
    table = _Table(texts)
    overall, per_text = table.ratios(*table.as_measured())
    drawn = table.ratios(*table.drawn(np.random.default_rng(seed), draws))
    return SpeedUp(_estimate(overall, drawn[0]), _estimate(per_text, drawn[1]))


class _Table:
    """Texts as arrays, repeats padded."""

    def __init__(self, texts: Sequence[Paired]) -> None:
        self._repeats = np.array([len(text.seconds) for text in texts])
        width = int(self._repeats.max())
        self._plain = np.array([_padded(text.plain_seconds, width) for text in texts])
        self._other = np.array([_padded(text.seconds, width) for text in texts])
        self._plain_tokens = np.array([text.plain_tokens for text in texts], dtype=float)
        self._other_tokens = np.array([text.tokens for text in texts], dtype=float)

    def as_measured(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        count, width = self._plain.shape
        return np.arange(count)[None], np.tile(np.arange(width), (1, count, 1))

    def drawn(
        self, random: np.random.Generator, draws: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Texts (draws, texts), and repeats (draws, texts, repeats) of each."""
        count, width = self._plain.shape
        texts = random.integers(0, count, (draws, count))
        chances = random.random((draws, count, width))
        return texts, (chances * self._repeats[texts][..., None]).astype(np.int64)

    def ratios(
        self, texts: NDArray[np.int64], repeats: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(draws,) each: of all texts together, and the median over texts."""
        beyond = np.arange(repeats.shape[2]) >= self._repeats[texts][..., None]
        plain, other = (
            np.nanmedian(np.where(beyond, np.nan, seconds[texts[..., None], repeats]), axis=2)
            for seconds in (self._plain, self._other)
        )
        plain_tokens, other_tokens = self._plain_tokens[texts], self._other_tokens[texts]
        paces = plain.sum(axis=1) / plain_tokens.sum(axis=1)
        overall = paces * other_tokens.sum(axis=1) / other.sum(axis=1)
        per_text = np.median(plain / plain_tokens * other_tokens / other, axis=1)
        return overall, per_text


def _padded(seconds: Sequence[float], width: int) -> list[float]:
    return [*seconds, *[seconds[-1]] * (width - len(seconds))]


def _estimate(value: NDArray[np.float64], drawn: NDArray[np.float64]) -> Estimate:
    tail = (1 - COVERAGE) / 2 * 100
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Estimate(float(value[0]), float(low), float(high))


def _counts(text: Paired) -> bool:
    seconds = *text.plain_seconds, *text.seconds
    return bool(text.tokens and text.plain_tokens and seconds and min(seconds) > 0)
