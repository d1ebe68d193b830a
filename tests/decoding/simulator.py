"""A decoding in which only time and verdicts exist: the shipped controller, published cost curves.

Costs are in plain steps. Whether a drafted token is right depends on its position in the text
alone, so every controller meets the same text under the same seed. The controller sees times with
log-normal noise; what is compared is the clock without it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_specdec.decoding.stopwatch import FIRST
from mlx_specdec.draft_length import cache as cost_cache
from mlx_specdec.draft_length import experience
from mlx_specdec.draft_length.acceptance import Acceptance as Verdicts
from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.budget import Budget
from mlx_specdec.draft_length.experience import Experience
from mlx_specdec.draft_length.learned import Known, weighed

from ..support.mocks import a_round

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
MOST = AutoLength.LONGEST_DRAFT
DRIFT_ROUNDS = 25
BEYOND = 10_000
"""Room for tokens where nobody knows that a text is about to end."""
Acceptance = Callable[[int], float]
Make = Callable[[], AutoLength]


def constant(alpha: float) -> Acceptance:
    """The same acceptance everywhere."""
    return lambda position: alpha


def drifting(position: int) -> float:
    """From 0.9 down to 0.2 and back, once in a thousand tokens."""
    return 0.55 + 0.35 * math.cos(2 * math.pi * position / 1000)


def bimodal(position: int) -> float:
    """Stretches of forty easy tokens and of forty hard ones."""
    return 0.95 if position // 40 % 2 else 0.2


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
    """A pair on a machine. draft: c. acceptance: chance that the draft is right at a position.
    reading: what a draft takes to read a prompt that it has not read along with the target. drift:
    standard deviation of the logarithm of its slowness, which changes within DRIFT_ROUNDS."""

    curve: dict[int, float]
    draft: float
    acceptance: Acceptance
    noise: float = NOISE
    reading: float = 0.0
    drift: float = 0.0

    def costs(self) -> list[float]:
        """What a round of 0, 1, ... drafted tokens costs, in plain steps."""
        rounds = range(1, MOST + 1)
        return [1.0, *(n * self.draft + verify_cost(self.curve, n + 1) for n in rounds)]

    def time(
        self,
        lengths: AutoLength,
        tokens: int,
        seed: int,
        after: int = 0,
        costs: Sequence[float] = (),
        *,
        abrupt: bool = False,
    ) -> tuple[float, int]:
        """Plain steps' worth of time, and tokens, of a text from round `after` on. abrupt: nobody
        knows its end before."""
        costs = costs or self.costs()
        dice = random.Random(seed)
        right = [dice.random() < self.acceptance(t) for t in range(tokens + MOST + 1)]
        noise = random.Random(seed + 1).gauss
        slow = self._slowness(seed)
        emitted, clock, rounds, waiting, unread = 0, 0.0, 0, False, 0
        speculative = 0
        reading = 0.0 if lengths.reads_along else self.reading
        before = (0.0, 0)
        while emitted < tokens:
            if rounds == after:
                before = (clock, emitted)
            rounds += 1
            count = lengths.choose(BEYOND if abrupt else tokens - emitted)
            if count == 0 or waiting:
                # The step in flight when drafting begins again is read first, and not reported.
                clock += 1.0
                emitted += 1
                unread += 1
                waiting = count == 0
                if waiting:
                    seconds = next(slow) * math.exp(self.noise * noise(0, 1))
                    lengths.on_round(a_round(0, 0, seconds))
                continue
            accepted = 0
            while accepted < count and right[emitted + accepted]:
                accepted += 1
            catch_up, reading = unread * self.draft / 20 + reading, 0.0
            clock += costs[count] + catch_up
            factor = next(slow)
            draft = factor * (count * self.draft + catch_up) * math.exp(self.noise * noise(0, 1))
            verify = factor * (costs[count] - count * self.draft)
            total = draft + verify * math.exp(self.noise * noise(0, 1))
            timed = speculative < FIRST and lengths.wants_parts
            speculative += 1
            unread = 0
            emitted = min(tokens, emitted + accepted + 1)
            lengths.on_round(a_round(count, accepted, total, draft if timed else None))
        return clock - before[0], emitted - before[1]

    def _slowness(self, seed: int) -> Iterator[float]:
        """Round by round."""
        gauss, kept = random.Random(seed + 2).gauss, 1 - 1 / DRIFT_ROUNDS
        place = gauss(0, 1)
        while True:
            yield math.exp(self.drift * place)
            place = kept * place + math.sqrt(1 - kept**2) * gauss(0, 1)

    def speed(
        self, make: Make, tokens: int, seeds: int, after: int = 0, *, abrupt: bool = False
    ) -> float:
        """Tokens per plain step over so many texts, a fresh controller each."""
        costs = self.costs()
        runs = [
            self.time(make(), tokens, seed, after, costs, abrupt=abrupt) for seed in range(seeds)
        ]
        return sum(count for _, count in runs) / math.fsum(clock for clock, _ in runs)

    def best_fixed(
        self, tokens: int, seeds: int, after: int = 0, *, abrupt: bool = False
    ) -> tuple[int, float]:
        """The best fixed length on the same texts, plain decoding included, and its speed."""
        runs = self._runs(tokens, seeds)
        speeds = [self.fixed_speed(n, tokens, runs, after, abrupt=abrupt) for n in range(MOST + 1)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best, speeds[best]

    def _runs(self, tokens: int, seeds: int) -> np.ndarray:
        """(seeds, positions): how many drafted tokens are right in a row from there."""
        places = tokens + MOST + 1
        chances = [self.acceptance(t) for t in range(places)]
        dice = [random.Random(seed).random for seed in range(seeds)]
        right = np.array([[draw() < chance for chance in chances] for draw in dice])
        runs = np.zeros((seeds, places + 1), dtype=np.int64)
        for place in reversed(range(places)):
            runs[:, place] = np.where(right[:, place], runs[:, place + 1] + 1, 0)
        return runs

    def fixed_speed(
        self,
        length: int,
        tokens: int,
        runs: np.ndarray,
        after: int = 0,
        *,
        abrupt: bool = False,
    ) -> float:
        """As `speed` of FixedLength(length), for all texts at once."""
        costs = np.array(self.costs())
        text = np.arange(len(runs))
        emitted, clock = np.zeros(len(runs), dtype=np.int64), np.zeros(len(runs))
        before = clock.copy(), emitted.copy()
        rounds = 0
        while (emitted < tokens).any():
            if rounds == after:
                before = clock.copy(), emitted.copy()
            rounds += 1
            count = np.clip(length, 0, BEYOND if abrupt else tokens - emitted - 1)
            going = emitted < tokens
            clock += np.where(going, costs[count.clip(0)], 0.0)
            accepted = np.minimum(runs[text, emitted], count)
            emitted = np.minimum(tokens, emitted + np.where(going, accepted + 1, 0))
        return float((emitted - before[1]).sum() / (clock - before[0]).sum())


class Texts:
    """Texts one after the other, each of which begins with what the ones before it taught.

    costs: that are known to the first one. earlier: what else is.
    """

    def __init__(
        self,
        machine: Machine,
        tokens: int,
        costs: Known | None = None,
        earlier: Experience | None = None,
        *,
        abrupt: bool = False,
    ) -> None:
        self._machine = machine
        self._abrupt = abrupt
        self._tokens = tokens
        self._costs = weighed(costs or {})
        self._earlier = earlier

    def run(self, seeds: Sequence[int]) -> float:
        """Tokens per plain step over texts of these seeds."""
        clock, emitted = 0.0, 0
        costs = self._machine.costs()
        for seed in seeds:
            lengths = self._begin()
            took, tokens = self._machine.time(
                lengths, self._tokens, seed, 0, costs, abrupt=self._abrupt
            )
            clock, emitted = clock + took, emitted + tokens
            self._keep(lengths)
        return emitted / clock

    def _begin(self) -> AutoLength:
        earlier = self._earlier
        return AutoLength(
            self._costs,
            acceptance=Verdicts(MOST, earlier=earlier.verdicts if earlier else None),
            budget=Budget(earlier.saved if earlier else None),
            reading=earlier.reading if earlier else 0.0,
        )

    def _keep(self, lengths: AutoLength) -> None:
        """As on disk."""
        self._costs = cost_cache.together(self._costs, lengths.learned())
        learned = lengths.experience
        earlier = self._earlier
        self._earlier = learned if earlier is None else experience.together(earlier, learned)
