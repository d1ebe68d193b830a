"""Batches in which only time and verdicts exist: the shipped controllers, published cost curves.

Costs are in plain steps of one sequence: a pass over so many tokens in all costs what the curve
says, whosever they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_specdec.draft_length import cache as cost_cache
from mlx_specdec.draft_length import experience
from mlx_specdec.draft_length.acceptance import Acceptance
from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.budget import Budget
from mlx_specdec.draft_length.by_rows import LengthsByRows
from mlx_specdec.draft_length.cache import beside
from mlx_specdec.draft_length.experience import Experience
from mlx_specdec.draft_length.learned import Learned
from mlx_specdec.draft_length.length import DraftLength, FixedLength
from mlx_specdec.interfaces.rounds import RoundReport, RoundTimes, SequenceRound

from .simulator import MOST, verify_cost

JOINS_AT = 0.25
"""As in mlx_specdec.engine.scheduler."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
Kept = tuple[dict[int, dict[int, Learned]], Experience | None]
"""What is on disk: costs by size of batch, and the rest."""


@dataclass
class _Row:
    left: int
    position: int = 0
    unread: bool = True


@dataclass(frozen=True)
class BatchMachine:
    """draft: c. alpha: acceptance. reading: what the draft takes to read
    a prompt."""

    curve: Mapping[int, float]
    draft: float
    alpha: float
    reading: float = 0.3
    noise: float = 0.15

    def cost(self, rows: int, count: int) -> float:
        """Of a round of so many drafted tokens for each of these rows."""
        curve = dict(self.curve)
        return count * self.draft * verify_cost(curve, rows) + verify_cost(
            curve, rows * (count + 1)
        )

    def time(self, lengths: DraftLength, size: int, texts: list[int], seed: int) -> float:
        """Plain steps of one sequence that texts of these lengths take."""
        dice, noise = random.Random(seed), random.Random(seed + 1)
        waiting, running, clock, in_flight = list(texts), [], 0.0, False
        while waiting or running:
            free = size - len(running)
            if waiting and free >= max(1, JOINS_AT * size):
                # Nothing is in flight when others join.
                in_flight = False
                running += [_Row(left) for left in waiting[:free]]
                del waiting[:free]
            count = lengths.choose(max(row.left for row in running), len(running))
            drained, in_flight = in_flight and count > 0, count == 0
            count = 0 if drained else count
            took = self.cost(len(running), count)
            unread = sum(row.unread for row in running)
            if count and unread:
                took += self.reading * verify_cost(dict(self.curve), unread)
            clock += took
            rounds = tuple(self._round(row, count, dice) for row in running)
            seconds = RoundTimes(took * math.exp(self.noise * noise.gauss(0, 1)))
            lengths.on_round(
                RoundReport(count, rounds, seconds, pipelined=count == 0 and not drained)
            )
            running = [row for row in running if row.left > 0]
        return clock

    def _round(self, row: _Row, count: int, dice: random.Random) -> SequenceRound:
        accepted = 0
        # One draw a token, so that every length meets texts alike.
        while accepted < count and dice.random() < self.alpha:
            accepted += 1
        accepted = min(accepted, row.left - 1)
        position = row.position
        row.left -= accepted + 1
        row.position += accepted + 1
        row.unread = row.unread and count == 0
        return SequenceRound(count, accepted, accepted + 1, position, [], ended=row.left == 0)

    def fixed(self, count: int, size: int, texts: list[int], seeds: int) -> float:
        """Plain steps with so many drafted tokens, on average over the seeds."""
        return sum(self.time(FixedLength(count), size, texts, s) for s in range(seeds)) / seeds

    def best_fixed(self, size: int, texts: list[int], seeds: int) -> float:
        """Plain steps of the best fixed length, plain decoding included."""
        return min(self.fixed(count, size, texts, seeds) for count in (0, 1, 2, 3, 5, 8))

    def auto(self, size: int, texts: list[int], seeds: int, files: int) -> list[float]:
        """Plain steps of each of so many files in a row, which teach one another; means."""
        sums = [0.0] * files
        for seed in range(seeds):
            kept: Kept = ({}, None)
            for file in range(files):
                lengths, keep = by_rows(kept)
                sums[file] += self.time(lengths, size, texts, seed + 1000 * file)
                kept = keep()
        return [total / seeds for total in sums]


def by_rows(kept: Kept) -> tuple[LengthsByRows, Callable[[], Kept]]:
    """As mlx_specdec.engine.drafters makes it, without files."""
    costs, earlier = kept
    acceptance = Acceptance(MOST, earlier=earlier.verdicts if earlier else None)
    budget = Budget(earlier.saved if earlier else None)
    made: dict[int, AutoLength] = {}

    def make(rows: int) -> AutoLength:
        known = {
            size: costs.get(size, {}) | (made[size].learned() if size in made else {})
            for size in SIZES
        }
        own = known[rows]
        begins = own or beside(known, rows)
        made[rows] = AutoLength(
            begins,
            MOST,
            acceptance,
            guessed=not own,
            budget=budget,
            rows=rows,
        )
        return made[rows]

    def keep() -> Kept:
        new = {
            size: cost_cache.together(costs.get(size, {}), its.learned())
            for size, its in made.items()
        }
        learned = made[max(made)].experience
        together = experience.together(earlier, learned) if earlier else learned
        return {**costs, **new}, together

    return LengthsByRows(make), keep
