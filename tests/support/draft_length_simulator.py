"""Decodings in which only time and verdicts exist: the shipped controller, published cost curves.

Costs are in plain steps. Whether a drafted token is right depends on its position in the text
alone, so every controller meets the same text under the same seed. The controller sees times with
log-normal noise; what is compared is the clock without it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mlx_specdec.draft_length.auto_length import AutoLength, Source
from mlx_specdec.draft_length.length import DraftLength
from mlx_specdec.draft_length.saved import Knowledge
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound

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
TWO_CORES = {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.2, 16: 3.5, 32: 6.0, 64: 11.5, 128: 22.0}
"""By tokens of a pass, roughly as small models behave on two cores."""
NOISE = 0.3
MOST = 16
DRIFT_ROUNDS = 25
BEYOND = 10_000
"""Room for tokens where nobody knows that a text is about to end."""
STALLED = 5.0
"""How many times as long a stalled round takes."""
READ_AT_ONCE = 20
"""Tokens that a draft reads in the time in which it drafts one."""
DRAFT = Source("draft")
LOOKUP = Source("ngram", free=True, costs="free", text="ngram")
Acceptance = Callable[[int], float]


def constant(alpha: float) -> Acceptance:
    """The same acceptance everywhere."""
    return lambda position: alpha


def drifting(position: int) -> float:
    """From 0.9 down to 0.2 and back, once in a thousand tokens."""
    return 0.55 + 0.35 * math.cos(2 * math.pi * position / 1000)


def bimodal(position: int) -> float:
    """Stretches of forty easy tokens and of forty hard ones."""
    return 0.95 if position // 40 % 2 else 0.2


def verify_cost(curve: Mapping[int, float], rows: int) -> float:
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


def a_round(
    drafted: int,
    accepted: int,
    seconds: float,
    source: str = "",
    position: int = 1,
    context: int = 0,
) -> RoundReport:
    """What is reported of a round of one sequence, or of a pipelined plain step."""
    committed = range(context + position + accepted + 1)
    its = SequenceRound(drafted, accepted, accepted + 1, position, committed, source=source)
    return RoundReport(drafted, (its,), RoundTimes(seconds), source, pipelined=not drafted)


class Limited(Protocol):
    """A draft length of several sources."""

    def limit(self, name: str, most: int, rows: int = 1) -> int: ...


@dataclass(frozen=True)
class Machine:
    """A pair on a machine. draft: c. acceptance: chance that the draft is right at a position.
    drift: standard deviation of the logarithm of its slowness, which changes within DRIFT_ROUNDS.
    stalls: share of rounds that take STALLED times as long. matches: share of the positions where
    lookup has something to say, which is right with the chance `lookup`. context: tokens before the
    text, each of which makes every row of a pass dearer by `attention` plain steps."""

    curve: Mapping[int, float]
    draft: float
    acceptance: Acceptance
    noise: float = NOISE
    drift: float = 0.0
    stalls: float = 0.0
    matches: float = 0.0
    lookup: float = 0.0
    context: int = 0
    attention: float = 0.0

    def costs(self, draft: float | None = None) -> list[float]:
        """What a round of 0, 1, ... drafted tokens costs, in plain steps at this context."""
        long = self.context * self.attention
        each = self.draft if draft is None else draft
        return [
            (n * each * (1 + long) + verify_cost(self.curve, n + 1) + (n + 1) * long) / (1 + long)
            for n in range(MOST + 1)
        ]

    def sources(self) -> tuple[Source, ...]:
        """Who drafts."""
        return (LOOKUP, DRAFT) if self.matches else (DRAFT,)

    def time(
        self, lengths: DraftLength, tokens: int, seed: int, after: int = 0, *, abrupt: bool = False
    ) -> tuple[float, int]:
        """Plain steps' worth of time, and tokens, of a text from round `after` on. abrupt: nobody
        knows its end before."""
        costs, free = self.costs(), self.costs(0.0)
        dice, luck = random.Random(seed), random.Random(seed + 3)
        right = [dice.random() < self.acceptance(t) for t in range(tokens + MOST + 1)]
        found = [luck.random() < self.matches for _ in right]
        known = [luck.random() < self.lookup for _ in right]
        slow = self._slowness(seed)
        emitted, clock, rounds, in_flight, unread = 0, 0.0, 0, False, 0
        before = (0.0, 0)
        while emitted < tokens:
            if rounds == after:
                before = (clock, emitted)
            rounds += 1
            asked = lengths.choose(BEYOND if abrupt else tokens - emitted)
            name, count = self._drafts(lengths, asked, found[emitted])
            if count == 0 or in_flight:
                # The step in flight when drafting begins again is read first.
                clock += 1.0
                in_flight = count == 0
                unread += 1
                report = a_round(0, 0, next(slow), "", emitted, self.context)
                lengths.on_round(replace(report, pipelined=in_flight))
                emitted += 1
                continue
            accepted = 0
            stays = known if name == LOOKUP.name else right
            while accepted < count and stays[emitted + accepted]:
                accepted += 1
            took = free[count] if name == LOOKUP.name else costs[count]
            if name != LOOKUP.name:
                took += unread * self.draft / READ_AT_ONCE
                unread = 0
            else:
                unread += accepted + 1
            clock += took
            report = a_round(count, accepted, took * next(slow), name, emitted, self.context)
            lengths.on_round(report)
            emitted = min(tokens, emitted + accepted + 1)
        return clock - before[0], emitted - before[1]

    def _drafts(self, lengths: DraftLength, asked: int, found: bool) -> tuple[str, int]:
        """Who drafts, and how much."""
        if not self.matches or not isinstance(lengths, AutoLength):
            return "", asked
        looked_up = lengths.limit(LOOKUP.name, asked) if found else 0
        if looked_up:
            return LOOKUP.name, looked_up
        return DRAFT.name, lengths.limit(DRAFT.name, asked)

    def _slowness(self, seed: int) -> Iterator[float]:
        """Round by round."""
        dice, noise, kept = random.Random(seed + 2), random.Random(seed + 1), 1 - 1 / DRIFT_ROUNDS
        place = dice.gauss(0, 1)
        while True:
            stalled = STALLED if self.stalls and dice.random() < self.stalls else 1.0
            yield stalled * math.exp(self.drift * place + self.noise * noise.gauss(0, 1))
            place = kept * place + math.sqrt(1 - kept**2) * dice.gauss(0, 1)

    def speed(
        self,
        make: Callable[[], DraftLength],
        tokens: int,
        seeds: int,
        after: int = 0,
        *,
        abrupt: bool = False,
    ) -> float:
        """Tokens per plain step over so many texts, a fresh controller each."""
        runs = [self.time(make(), tokens, seed, after, abrupt=abrupt) for seed in range(seeds)]
        return sum(count for _, count in runs) / math.fsum(clock for clock, _ in runs)

    def best_fixed(
        self, tokens: int, seeds: int, after: int = 0, *, abrupt: bool = False
    ) -> tuple[int, float]:
        """The best fixed length on the same texts, plain decoding included, and its speed."""
        runs = self._runs(tokens, seeds)
        speeds = [self._fixed(n, tokens, runs, after, abrupt=abrupt) for n in range(MOST + 1)]
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

    def _fixed(
        self, length: int, tokens: int, runs: np.ndarray, after: int, *, abrupt: bool
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
    """Texts one after the other, each of which begins with what the ones before it taught."""

    def __init__(
        self,
        machine: Machine,
        tokens: int,
        knowledge: Knowledge | None = None,
        *,
        abrupt: bool = False,
    ) -> None:
        self.machine = machine
        self.knowledge = knowledge or Knowledge()
        self._abrupt = abrupt
        self._tokens = tokens

    def run(self, seeds: Sequence[int]) -> float:
        """Tokens per plain step over texts of these seeds."""
        clock, emitted = 0.0, 0
        for seed in seeds:
            lengths = AutoLength(self.machine.sources(), self.knowledge)
            took, tokens = self.machine.time(lengths, self._tokens, seed, abrupt=self._abrupt)
            clock, emitted = clock + took, emitted + tokens
            self.knowledge = self.knowledge.updated(lengths.knowledge)
        return emitted / clock


JOINS_AT = 0.25
"""Share of the places of a batch that must be free before others join, as for a list of prompts."""


@dataclass
class _Row:
    left: int
    position: int = 0
    unread: bool = True


@dataclass(frozen=True)
class BatchMachine:
    """Batches. A pass over so many tokens in all costs what the curve says, whosever they are, in
    plain steps of one sequence. alpha: acceptance. reading: what the draft takes to read a
    prompt. joins_at: 0 as in the server."""

    curve: Mapping[int, float]
    draft: float
    alpha: float
    reading: float = 0.3
    noise: float = 0.15
    joins_at: float = JOINS_AT

    def cost(self, rows: int, count: int) -> float:
        """Of a round of so many drafted tokens for each of these rows."""
        drafting = count * self.draft * verify_cost(self.curve, rows)
        return drafting + verify_cost(self.curve, rows * (count + 1))

    def time(
        self,
        lengths: DraftLength,
        size: int,
        texts: Sequence[int],
        seed: int,
        every: float = 0.0,
    ) -> float:
        """Plain steps of one sequence that texts of these lengths take. every: so long after one
        another they come; the time is then summed over them, from when each comes to its end."""
        dice, noise = random.Random(seed), random.Random(seed + 1)
        waiting = [(every * place, left) for place, left in enumerate(texts)]
        running: list[_Row] = []
        came: list[float] = []
        clock, in_flight, waited = 0.0, False, 0.0
        while waiting or running:
            if not running:
                clock = max(clock, waiting[0][0])
            here = sum(at <= clock for at, _ in waiting)
            free = min(size - len(running), here)
            if free >= max(1, self.joins_at * size) or (free and not running):
                # Nothing is in flight when others join.
                in_flight = False
                running += [_Row(left) for _, left in waiting[:free]]
                came += [at for at, _ in waiting[:free]]
                del waiting[:free]
            count = lengths.choose(max(row.left for row in running), len(running))
            drained, in_flight = in_flight and count > 0, count == 0
            count = 0 if drained else count
            took = self.cost(len(running), count)
            unread = sum(row.unread for row in running)
            if count and unread:
                took += self.reading * verify_cost(self.curve, unread)
            clock += took
            rounds = tuple(self._round(row, count, dice) for row in running)
            seconds = RoundTimes(took * math.exp(self.noise * noise.gauss(0, 1)))
            lengths.on_round(
                RoundReport(count, rounds, seconds, pipelined=count == 0 and not drained)
            )
            ended = [place for place, row in enumerate(running) if row.left <= 0]
            waited += sum(clock - came[place] for place in ended)
            came = [at for at, row in zip(came, running, strict=True) if row.left > 0]
            running = [row for row in running if row.left > 0]
        return waited if every else clock

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
        committed = range(row.position)
        return SequenceRound(
            count, accepted, accepted + 1, position, committed, ended=row.left == 0
        )

    def auto(
        self, size: int, texts: Sequence[int], seeds: int, files: int, every: float = 0.0
    ) -> list[float]:
        """The time of each of so many files in a row, which teach one another; means."""
        sums = [0.0] * files
        for seed in range(seeds):
            knowledge = Knowledge()
            for file in range(files):
                lengths = AutoLength((DRAFT,), knowledge)
                sums[file] += self.time(lengths, size, texts, seed + 1000 * file, every)
                knowledge = knowledge.updated(lengths.knowledge)
        return [total / seeds for total in sums]
