"""What rounds cost in plain steps, learned from the seconds that they take.

The seconds of a round are those of a plain step, which wander as the machine gets slower and
faster, times the cost of the round. A Kalman filter knows the logarithms of both, and how sure they
are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MOST = 16
"""The longest draft whose cost is known."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a draft is dropped after its first rounds. From one step
on it cannot gain anything, but a single round tells its cost only to within a factor."""
RISE = 0.35
"""Logarithm of what a round costs more for each doubling of its tokens, before any was seen. The
published curves lie between 0 and 1; with 0.25 the first texts lose 4 % to drafts that are too
long, with 0.5 they never find the long ones that pay on flat curves."""
DOUBT = RISE / 2
"""Variance of that logarithm for each doubling, a quarter of it common to all doublings; a quarter
is added for each doubling of a batch. With 0.1 costs far from the expected ones are believed too
late (3 % of texts of 12 tokens)."""
DRIFT = 0.05
"""Standard deviation of the change of the logarithm of the machine's speed from round to round.
The value for costs is a sixteenth of this. The noise of a round starts at five times this and is
then learned. With 0.02 wandering machines lose 2 %, with 0.1 steady ones 1 %."""
UNLIKELY = 2.5
"""Standard deviations beyond which a round counts the less the farther off it is: it stalled."""

SIZE = MOST + 2
"""Of a block: costs of 1 to MOST drafted tokens, the context's slope, the price of reading."""
SLOPE, READING = MOST, MOST + 1
DOUBLINGS = np.log2(np.arange(2, MOST + 2))
_SHARED = np.minimum.outer(DOUBLINGS, DOUBLINGS)


class Block(NamedTuple):
    """What is known of one source's rounds: mean (SIZE,) and covariance (SIZE, SIZE) of logarithms.

    The slope is what the logarithm of a cost rises by for a doubling of the round's tokens and one
    of the context's beyond 1,024. Reading is what a token costs that the source has not read."""

    mean: np.ndarray
    covariance: np.ndarray

    def resized(self, factor: float) -> Block:
        """Return what is expected of batches of so many times as many rows: what passes over as
        many tokens cost, and beyond the longest of them what the last doubling says."""
        if factor == 1:
            return self
        shift, whole = math.log2(factor), np.eye(SIZE)
        passes = np.array([_weights(each + shift) for each in DOUBLINGS])
        whole[:MOST, :MOST] = passes - _weights(shift)
        # Reading takes so many times as long, and a plain step takes what a pass over them does.
        whole[READING, :MOST] -= _weights(shift)
        covariance = whole @ self.covariance @ whole.T
        covariance[:MOST, :MOST] += DOUBT / 4 * abs(shift) * _SHARED
        mean = whole @ self.mean
        mean[READING] += math.log(factor)
        return Block(mean, covariance)


def _weights(doublings: float) -> np.ndarray:
    """Return by how much the cost of each length counts in that of a pass over so many doublings of
    a plain step's tokens."""
    points, weights = [0.0, *DOUBLINGS], np.zeros(MOST + 1)
    high = max(1, bisect_left(points, doublings))
    low, high = (MOST // 2 - 1, MOST) if high > MOST else (high - 1, high)
    share = (doublings - points[low]) / (points[high] - points[low])
    weights[[low, high]] = 1 - share, share
    return weights[1:]


def unknown() -> Block:
    """Return what is expected of a source before its first round."""
    read = math.log(math.expm1(RISE) / MOST / 8)
    covariance = np.diag(np.array([0.0] * MOST + [0.01, 6.0]))
    covariance[:MOST, :MOST] = DOUBT * (_SHARED + np.outer(DOUBLINGS, DOUBLINGS) / 4)
    return Block(np.array([*(RISE * DOUBLINGS), 0.0, read]), covariance)


_UNKNOWN = unknown().covariance
_KEPT = 1 - DRIFT**2 / 16 / RISE
"""Of what is known of costs, in 16 rounds."""


class Costs:
    """The filter for rounds of several sources in batches of one size."""

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        size = 1 + SIZE * len(blocks)
        self._mean, self._covariance = np.zeros(size), np.zeros((size, size))
        self._own = {
            name: slice(1 + SIZE * place, 1 + SIZE * (place + 1))
            for place, name in enumerate(blocks)
        }
        for name, own in self._own.items():
            self._mean[own], self._covariance[own, own] = blocks[name]
        self._covariance[0, 0] = 100.0
        self._noise, self._context = (5 * DRIFT) ** 2, 0.0
        self._rounds = self.plain_steps = 0

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a round's seconds."""
        return math.sqrt(self._noise)

    @property
    def plain(self) -> float:
        """Seconds of a plain step, 0 before a round was seen."""
        return math.exp(self._mean[0]) if self._rounds else 0.0

    def too_expensive(self, drafted: int, seconds: float) -> bool:
        """Return whether a round shows that the draft takes more than TOO_EXPENSIVE plain steps per
        token; False before a plain step was seen."""
        return 0 < self.plain * (1 + TOO_EXPENSIVE * drafted) < seconds

    def block(self, name: str) -> Block:
        """Return what is known of a source."""
        own = self._own[name]
        return Block(self._mean[own].copy(), self._covariance[own, own].copy())

    def rounds(self, name: str, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what rounds cost in plain steps by drafted length, 0 to `most`, which is at most
        MOST, where the context is as long as in the last round, and the standard errors of the
        logarithms; both (1 + most,)."""
        own, tilt = self._own[name], self._context * DOUBLINGS
        mean, covariance = self._mean[own], self._covariance[own, own]
        variance = np.diagonal(covariance)[:MOST] + tilt * (
            2 * covariance[SLOPE, :MOST] + tilt * covariance[SLOPE, SLOPE]
        )
        costs, errors = np.ones(most + 1), np.zeros(most + 1)
        costs[1:] = np.exp(mean[:MOST] + tilt * mean[SLOPE])[:most]
        errors[1:] = np.sqrt(np.maximum(variance, 0.0))[:most]
        return costs, errors

    def reading(self, name: str, tokens: float) -> tuple[float, float]:
        """Return the plain steps that a source's next round costs more where it has so many
        tokens to read, and with one standard error."""
        at = self._own[name].start + READING
        cost = tokens * math.exp(self._mean[at])
        return cost, cost * math.exp(math.sqrt(self._covariance[at, at]))

    def behind(self, context: float) -> None:
        """Take note that rounds are behind so many tokens of context."""
        self._context = math.log2(1 + context / 1024)

    def add(
        self, name: str, drafted: int, seconds: float, context: float = 0.0, unread: float = 0.0
    ) -> None:
        """Learn from a round of at most MOST drafted tokens, 0 for a plain step, behind so many
        tokens of context, before which its source had so many tokens to read."""
        self.behind(context)
        self.plain_steps += not drafted
        mean, covariance, took = self._mean, self._covariance, math.log(max(seconds, 1e-9))
        first, self._rounds = not self._rounds, self._rounds + 1
        covariance[0, 0] += DRIFT**2
        for own in self._own.values() if self._rounds % 16 == 0 else ():
            # As costs change, one is in the end as unsure of them as before the first round.
            covariance[own] *= _KEPT
            covariance[:, own] *= _KEPT
            covariance[own, own] += (1 - _KEPT**2) * _UNKNOWN
        start = self._own[name].start if drafted else 0
        at = [0, start + drafted - 1, start + SLOPE, start + READING] if drafted else [0]
        before = point = mean[at].tolist()
        for _ in range(6):
            # What reading costs may be known so badly that one line through it says nothing.
            expected, weights = self._expected(point, drafted, unread)
            expected += sum(w * (b - p) for w, b, p in zip(weights, before, point, strict=True))
            gains = covariance[at].T @ weights
            off, variance = took - expected, float(weights @ gains[at]) + self._noise
            change = [
                b + gains[place] * off / variance for b, place in zip(before, at, strict=True)
            ]
            if not unread or abs(change[-1] - point[-1]) < 0.05:
                break
            point = [(p + each) / 2 for p, each in zip(point, change, strict=True)]
        if not first:
            surprise = off * off / variance
            self._noise += 0.05 * (max(0.03**2, self._noise * min(surprise, 9.0)) - self._noise)
            variance *= max(1.0, surprise / UNLIKELY**2) ** 2
        mean += gains * (off / variance)
        covariance -= np.outer(gains, gains / variance)
        if first:
            # The first round of all may have stalled.
            covariance[0, 0] = max(covariance[0, 0], 0.5)

    def _expected(
        self, point: Sequence[float], drafted: int, unread: float
    ) -> tuple[float, np.ndarray]:
        """Return the expected logarithm of a round's seconds, and its derivatives by the entries of
        `point`: a plain step, the cost, the slope, and the price of reading."""
        if not drafted:
            return point[0], np.ones(1)
        plain, cost, slope, price = point
        tilt = self._context * float(DOUBLINGS[drafted - 1])
        alone, reading = math.exp(cost + tilt * slope), unread * math.exp(price)
        share = alone / (alone + reading)
        return plain + math.log(alone + reading), np.array([1.0, share, share * tilt, 1 - share])


def ending_sooner(costs: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Return what rounds of each length cost if some drafts end sooner. reached: 1 and how long
    drafts get, for each length; all have a first token."""
    shares = np.diff(reached) / (reached[1] - reached[0])
    return np.cumsum([costs[0], *np.diff(costs) * shares])
