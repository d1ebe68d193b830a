"""A decoding in which only time and verdicts exist: the shipped controller, published cost curves.

Costs are in plain steps, log-normal noise on every round. Verdicts are drawn; throughput is tokens
over the true clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from mlx_specdec.decoding.draft_length import AutoLength, DraftLength

# Cost of a target pass over m rows, in passes over one: m -> cost, straight lines between.
# Published in threads of ml-explore/mlx: 4265 (M3 Ultra), 3852 (M4 Pro), 3791 (M5 Max).
CURVES: dict[str, dict[int, float]] = {
    "M3 Ultra 4-bit": {1: 1.0, 2: 1.83, 4: 3.26, 7: 5.28, 8: 6.12, 16: 6.32},
    "M3 Ultra bf16": {1: 1.0, 2: 1.99, 16: 2.0},
    "M4 Pro 4-bit": {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 16: 5.8},
    "M5 Max 70B": {1: 1.0, 3: 1.12, 5: 1.45, 8: 2.2, 16: 3.9},
    "flat": {1: 1.0, 16: 1.0},
    "linear": {1: 1.0, 16: 16.0},
}
NOISE = 0.3


def verify_cost(curve: dict[int, float], rows: int) -> float:
    """V(rows), straight lines between the published points."""
    low = max(m for m in curve if m <= rows)
    high = min((m for m in curve if m >= rows), default=None)
    if high is None:
        before = sorted(curve)[-2]
        slope = (curve[low] - curve[before]) / (low - before)
        return curve[low] + (rows - low) * slope
    if high == low:
        return curve[low]
    return curve[low] + (rows - low) / (high - low) * (curve[high] - curve[low])


@dataclass(frozen=True)
class Machine:
    """A pair on a machine. draft: c. alpha: acceptance at an output position."""

    curve: dict[int, float]
    draft: float
    alpha: Callable[[int], float]
    noise: float = NOISE

    def throughput(self, lengths: DraftLength, tokens: int, seed: int) -> float:
        """Tokens per plain step over a text of so many tokens."""
        dice = random.Random(seed)
        emitted, clock, rounds, waiting = 0, 0.0, 0, False
        unread = 0
        while emitted < tokens:
            count = lengths.choose(tokens - emitted)
            if count and waiting:
                # The step already in flight is read first; the loop does not report it.
                clock += 1.0
                emitted += 1
                unread += 1
                waiting = False
                continue
            if count == 0:
                seconds = self._noisy(1.0, dice)
                clock += seconds
                emitted += 1
                unread += 1
                waiting = True
                lengths.observe(0, 0, seconds)
                continue
            draft = self._noisy(count * self.draft + unread * self.draft / 20, dice)
            total = draft + self._noisy(verify_cost(self.curve, count + 1), dice)
            accepted = 0
            while accepted < count and dice.random() < self.alpha(emitted + accepted):
                accepted += 1
            timed = rounds < 4 or rounds % 32 == 0
            rounds += 1
            unread = 0
            clock += total
            emitted += accepted + 1
            lengths.observe(count, accepted, total, draft if timed else None)
        return tokens / clock

    def mean(self, make: Callable[[], DraftLength], tokens: int, seeds: int) -> float:
        """Mean throughput over so many seeds, a fresh controller each."""
        return math.fsum(self.throughput(make(), tokens, s) for s in range(seeds)) / seeds

    def best_fixed(self, most: int = AutoLength.MOST) -> tuple[int, float]:
        """The best fixed length for constant acceptance, and its expected throughput."""
        alpha = self.alpha(0)

        def rate(count: int) -> float:
            tokens = math.fsum(alpha**i for i in range(count + 1))
            cost = count * self.draft + verify_cost(self.curve, count + 1) if count else 1.0
            # The mean of a log-normal factor is above 1 for plain steps and rounds alike.
            return tokens / (cost * math.exp(self.noise**2 / 2))

        best = max(range(most + 1), key=rate)
        return best, rate(best)

    def _noisy(self, seconds: float, dice: random.Random) -> float:
        return seconds * math.exp(self.noise * dice.gauss(0, 1))
