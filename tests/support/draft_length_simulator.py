"""Decodings in which only time and verdicts exist: the shipped controller and the shipped wiring of
drafters, on machines with published cost curves.

Costs are in plain steps of one sequence. Whether a drafted token is right depends on its text and
its position alone, so every controller meets the same texts under the same seed. The controller
sees times with log-normal noise; what is compared is the clock without it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_specdec.decoding.statistics import FIRST
from mlx_specdec.draft_length.auto_length import AutoLength, Source
from mlx_specdec.draft_length.length import DraftLength, FixedLength
from mlx_specdec.draft_length.saved import Knowledge
from mlx_specdec.engine.opening import LONG_PROMPT, make_proposer, source
from mlx_specdec.interfaces import Noise, Proposal, Proposer, no_proposal
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound
from mlx_specdec.measure.calibrate import LEAST_TURNS, OF_BATCH, SHORT, first_survey
from mlx_specdec.options import Options
from mlx_specdec.proposers.drafter import Drafter

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
SLOW_BLAS = {1: 1.0, 2: 1.97, 3: 2.95, 4: 3.86}
"""Of MLX's own matrix product on a CPU, which reads the weights once for each row; measured."""
NOISE = 0.3
MOST = 16
DRIFT_ROUNDS = 25
BEYOND = 10_000
"""Room for tokens where nobody knows that a text is about to end."""
STALLED = 5.0
"""How many times as long a stalled round takes."""
CHANGES_AT = 30
"""Round from which a machine that changes is faster or slower, by turns."""
READ_AT_ONCE = 20
"""Tokens that a draft reads in the time in which it drafts one."""
SECOND = 50.0
"""Plain steps in a second: they take 20 ms, as those of 8B parameters in 4 bits on a laptop do."""
JOINS_AT = 0.125
"""Share of the places of a batch that must be free before others join, as for a list of prompts."""
DRAFT, LOOKUP = Source("draft"), Source("ngram", free=True, costs="free", text="ngram")
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
    """V(rows), straight lines between the published points and beyond the last two."""
    points = sorted(curve)
    high = next((m for m in points if m >= rows), points[-1])
    low = points[max(0, points.index(high) - 1)]
    if rows in (low, high):
        return curve[rows]
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


def hear(lengths: AutoLength, report: RoundReport) -> None:
    """A round whose successor is in flight by now."""
    lengths.on_round(report)
    lengths.meanwhile()


@dataclass(frozen=True)
class Text:
    """Of each position: whether the draft is right, whether lookup finds something, and whether
    that is right. comes: when, in plain steps. reading: what the draft takes to read its prompt."""

    tokens: int
    right: Sequence[bool]
    found: Sequence[bool] = ()
    known: Sequence[bool] = ()
    comes: float = 0.0
    reading: float = 0.0


@dataclass
class _Row:
    """A text in decoding. unread: what its draft takes to read what it has not seen."""

    text: Text
    emitted: int = 0
    unread: float = 0.0

    @property
    def left(self) -> int:
        return self.text.tokens - self.emitted


@dataclass
class _Scripted(Proposer):
    """Drafts for rows as their texts say."""

    rows: list[_Row]
    looks_up: bool
    batches = True

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return not self.looks_up or any(row.text.found[row.emitted] for row in self.rows)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        counts = [
            limit if not self.looks_up or row.text.found[row.emitted] else 0 for row in self.rows
        ]
        if not any(counts):
            return no_proposal(len(counts))
        return Proposal(mx.zeros((len(counts), limit), dtype=mx.int32), counts=tuple(counts))


@dataclass(frozen=True)
class Machine:
    """A pair on a machine. draft: c. acceptance: chance that the draft is right at a position.
    drift: standard deviation of the logarithm of its slowness, which changes within DRIFT_ROUNDS.
    stalls: share of rounds that take STALLED times as long. changes: from CHANGES_AT on, rounds
    take so many times as long, or as many times less. matches: share of the positions where lookup
    has something to say, which is right with the chance `lookup`. context: tokens before the text,
    each of which makes a row of a pass dearer by `attention` plain steps; the draft's keys cost as
    its weights do. shared: of that, the share that rows of one sequence pay together. start: plain
    steps that drafting takes whatever its length. prompt: tokens that an encoder reads. reading:
    plain steps in which the draft reads a token; a READ_AT_ONCE-th of c where it is not known."""

    curve: Mapping[int, float]
    draft: float
    acceptance: Acceptance
    noise: float = NOISE
    drift: float = 0.0
    stalls: float = 0.0
    changes: float = 1.0
    matches: float = 0.0
    lookup: float = 0.0
    context: int = 0
    attention: float = 0.0
    shared: float = 0.0
    start: float = 0.0
    prompt: int = 0
    reading: float | None = None

    @property
    def reads(self) -> float:
        """Plain steps in which the draft reads a token."""
        return self.draft / READ_AT_ONCE if self.reading is None else self.reading

    def cost(self, count: int, rows: int = 1, *, drafts: bool = True) -> float:
        """Plain steps of one sequence at this context that a round of `count` tokens takes, without
        what its draft has to read."""
        keys = self.context * self.attention
        each = 1 + (1 - self.shared) * count
        took = verify_cost(self.curve, rows * (count + 1)) + rows * each * keys
        if drafts and count:
            a_step = verify_cost(self.curve, rows) + rows * keys
            took += self.start + count * self.draft * a_step
        return took / (1 + keys)

    def costs(self) -> list[float]:
        """What a round of 0, 1, ... drafted tokens costs."""
        return [self.cost(n) for n in range(MOST + 1)]

    def drafters(self, rows: list[_Row]) -> tuple[Drafter, ...]:
        """The drafters of these rows, as a loaded pair names them."""
        draft = Drafter(DRAFT.name, lambda setup: _Scripted(rows, False), MOST, nbytes=1)
        free = Drafter(LOOKUP.name, lambda setup: _Scripted(rows, True), MOST)
        return (free, draft) if self.matches else (draft,)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The drafters as the controller knows them."""
        return tuple(source(each, Options()) for each in self.drafters([]))

    def calibrated(self, seed: int, rows: int = 1) -> tuple[dict[str, np.ndarray], float]:
        """Return what is measured before a pair's first text, or its first batch of so many rows,
        and the plain steps it takes."""
        known, took = (dict[str, np.ndarray](), 0.0) if rows == 1 else self.calibrated(seed)
        prompt = SHORT if rows == 1 else OF_BATCH
        survey = first_survey(self.sources[::-1], rows, known, seconds=SECOND)
        survey.begin_text(prompt)
        alone = replace(self, context=0, prompt=prompt)
        texts = [alone.text(BEYOND, seed + row) for row in range(rows)]
        decoding = Decoding(alone, survey, texts, seed, size=rows)
        while not survey.done:
            decoding.run(1)
        learned = survey.knowledge if survey.turns >= LEAST_TURNS else {}
        return {**known, **learned}, took + decoding.clock

    def text(
        self, tokens: int, seed: int, *, comes: float = 0.0, reading: float | None = None
    ) -> Text:
        """Return the text of a seed."""
        dice, luck = random.Random(seed), random.Random(seed + 3)
        right = [dice.random() < self.acceptance(t) for t in range(tokens + MOST + 1)]
        found = [luck.random() < self.matches for _ in right] if self.matches else ()
        known = [luck.random() < self.lookup for _ in found]
        if reading is None:
            reading = (self.context + self.prompt) * self.reads
        return Text(tokens, right, found, known, comes, reading)

    def time(
        self, lengths: DraftLength, tokens: int, seed: int, after: int = 0, *, abrupt: bool = False
    ) -> tuple[float, int]:
        """Plain steps' worth of time, and tokens, of a text from round `after` on. abrupt: nobody
        knows its end before."""
        decoding = Decoding(self, lengths, [self.text(tokens, seed)], seed, abrupt=abrupt)
        before, emitted = decoding.run(after)
        decoding.run()
        return decoding.clock - before, tokens - emitted

    def slowness(self, seed: int) -> Iterator[float]:
        """Yield what rounds take in place of 1."""
        dice, noise, kept = random.Random(seed + 2), random.Random(seed + 1), 1 - 1 / DRIFT_ROUNDS
        changed = math.log(self.changes) * (1 if seed % 2 else -1)
        place, rounds = dice.gauss(0, 1), 0
        while True:
            stalled = STALLED if self.stalls and dice.random() < self.stalls else 1.0
            late = changed if rounds >= CHANGES_AT else 0.0
            yield stalled * math.exp(self.drift * place + self.noise * noise.gauss(0, 1) + late)
            place = kept * place + math.sqrt(1 - kept**2) * dice.gauss(0, 1)
            rounds += 1

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
        right = np.array([self.text(tokens, seed).right for seed in range(seeds)])
        runs = np.zeros((seeds, right.shape[1] + 1), dtype=np.int64)
        for place in reversed(range(right.shape[1])):
            runs[:, place] = np.where(right[:, place], runs[:, place + 1] + 1, 0)
        return runs

    def _fixed(
        self, length: int, tokens: int, runs: np.ndarray, after: int, *, abrupt: bool
    ) -> float:
        """As `speed` of FixedLength(length), for all texts at once."""
        costs = np.array(self.costs())
        text = np.arange(len(runs))
        reading = (self.context + self.prompt) * self.reads if length else 0.0
        emitted, clock = np.zeros(len(runs), dtype=np.int64), np.full(len(runs), reading)
        before = np.zeros(len(runs)), emitted.copy()
        rounds = 0
        while (emitted < tokens).any():
            if 0 < rounds == after:
                before = clock.copy(), emitted.copy()
            rounds += 1
            count = np.clip(length, 0, BEYOND if abrupt else tokens - emitted - 1)
            going = emitted < tokens
            clock += np.where(going, costs[count.clip(0)], 0.0)
            accepted = np.minimum(runs[text, emitted], count)
            emitted = np.minimum(tokens, emitted + np.where(going, accepted + 1, 0))
        return float((emitted - before[1]).sum() / (clock - before[0]).sum())


class Decoding:
    """The steps of decoding.loop.Decoding and the admission of engine.scheduler.Scheduler.

    texts: in the order in which they come. size: of the batch. joins_at: share of its places that
    must be free before others join. waited: sum over texts from when they come to their ends.
    """

    def __init__(
        self,
        machine: Machine,
        lengths: DraftLength,
        texts: Sequence[Text],
        seed: int,
        *,
        size: int = 1,
        joins_at: float = 0.0,
        abrupt: bool = False,
    ) -> None:
        self.clock = self.waited = 0.0
        self._machine, self._lengths, self._abrupt = machine, lengths, abrupt
        self._size, self._joins_at = size, joins_at
        self._waiting, self._rows = list(texts), list[_Row]()
        self._slow = machine.slowness(seed)
        self._in_flight, self._timed = False, 0
        named = isinstance(lengths, AutoLength)
        if isinstance(lengths, AutoLength) and size == 1:
            remaining = BEYOND if abrupt else texts[0].tokens
            prompt = machine.context + machine.prompt
            late = prompt > LONG_PROMPT
            lengths.begin(machine.context, prompt, remaining, late=late)
        drafters = machine.drafters(self._rows)
        chosen = drafters if named else drafters[-1:]
        self._proposer = make_proposer(chosen, Options(), lengths, batch=size > 1)
        eager = lengths.eager(DRAFT.name) if named else lengths.choose(BEYOND) > 0
        self._eager = size == 1 and eager

    def run(self, rounds: int = BEYOND**2) -> tuple[float, int]:
        """Take so many rounds; return the clock and the tokens of the texts that go on."""
        while rounds and (self._waiting or any(row.left > 0 for row in self._rows)):
            self._step()
            rounds -= 1
        return self.clock, sum(row.emitted for row in self._rows)

    def _step(self) -> None:
        rows, proposer = self._rows, self._proposer
        assert proposer is not None
        if not self._in_flight:
            rows[:] = [row for row in rows if row.left > 0]
            self._admit()
        remaining = BEYOND if self._abrupt else max(row.left for row in rows)
        count = self._lengths.choose(remaining, len(rows))
        committed: Any = range(len(rows))
        made = no_proposal(len(rows))
        ahead = count == 0 or not proposer.ready(committed, count)
        if count and not self._in_flight:
            noise: Any = None
            made = proposer.propose(committed, count, noise)
        self._finish(made, ahead=ahead and not made.size)

    def _admit(self) -> None:
        if not self._rows:
            self.clock = max(self.clock, self._waiting[0].comes)
        joining = self._joining()
        del self._waiting[: len(joining)]
        if self._eager:
            self.clock += sum(text.reading for text in joining)
        self._rows += [_Row(text, unread=0.0 if self._eager else text.reading) for text in joining]

    def _joining(self) -> list[Text]:
        """Return the texts that have come, if there are places for them."""
        free = self._size - sum(row.left > 0 for row in self._rows)
        came = [text for text in self._waiting[:free] if text.comes <= self.clock]
        enough = len(came) >= max(1, self._joins_at * self._size)
        return came if enough or free == self._size else []

    def _finish(self, made: Proposal, *, ahead: bool) -> None:
        if isinstance(self._lengths, AutoLength):
            self._lengths.meanwhile()
        machine, rows, reports = self._machine, self._rows, list[SequenceRound]()
        # The next pass is submitted before this one is read, unless somebody leaves or joins.
        waits = any(row.left <= 0 for row in rows) or self._joining()
        drafts = made.size > 0 and DRAFT.name in (made.source or DRAFT.name)
        took = machine.cost(made.size, len(rows), drafts=drafts)
        verifying = machine.cost(made.size, len(rows), drafts=False)
        if reading := [row.unread for row in rows if drafts and row.unread]:
            # All rows together, as they draft.
            took += sum(reading) / len(reading) * verify_cost(machine.curve, len(reading))
        for place, row in enumerate(rows):
            row.unread = 0.0 if drafts else row.unread
            count = made.count(place) if made.size else 0
            name, text, accepted = made.source_of(place), row.text, 0
            right = text.known if name == LOOKUP.name else text.right
            while accepted < count and row.left > 0 and right[row.emitted + accepted]:
                accepted += 1
            if not drafts or name == LOOKUP.name:
                row.unread += (accepted + 1) * machine.reads
            position, going = row.emitted, row.left > 0
            row.emitted = min(text.tokens, position + accepted + 1)
            committed = range(machine.context + position + accepted + 1)
            ended = going and row.left == 0
            reports.append(
                SequenceRound(
                    count,
                    accepted,
                    row.emitted - position,
                    position,
                    committed,
                    ended=ended,
                    left=row.left,
                    source=name,
                )
            )
            if ended:
                self.waited -= text.comes
        self.clock += took
        self.waited += self.clock * sum(each.ended for each in reports)
        self._in_flight = ahead and not waits and any(row.left > 0 for row in rows)
        slow = next(self._slow)
        seconds = RoundTimes(slow * took)
        if made.size and self._timed < FIRST:
            seconds = RoundTimes(slow * took, slow * (took - verifying), slow * verifying)
        self._timed += made.size > 0
        self._lengths.on_round(
            RoundReport(
                made.size,
                tuple(reports),
                seconds,
                made.source,
                pipelined=self._in_flight,
                ended=not self._waiting and all(row.left <= 0 for row in rows),
                waiting=any(text.comes <= self.clock for text in self._waiting),
            )
        )


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
        self.knowledge = knowledge or {}
        self._abrupt = abrupt
        self._tokens = tokens

    def run(self, seeds: Sequence[int]) -> float:
        """Tokens per plain step over texts of these seeds."""
        clock, emitted = 0.0, 0
        for seed in seeds:
            lengths = AutoLength(self.machine.sources, self.knowledge)
            took, tokens = self.machine.time(lengths, self._tokens, seed, abrupt=self._abrupt)
            clock, emitted = clock + took, emitted + tokens
            self.knowledge = {**self.knowledge, **lengths.knowledge}
        return emitted / clock


@dataclass(frozen=True)
class Files:
    """Files of texts that are decoded many at once. tokens: of each text. size: of the batch.
    every: plain steps between two texts, as they come to a server; 0 where all are there at once.
    reading: plain steps in which the draft reads a prompt."""

    machine: Machine
    tokens: Sequence[int]
    size: int
    every: float = 0.0
    reading: float = 0.3

    def time(self, lengths: DraftLength, seed: int) -> float:
        """Plain steps of one sequence that the file takes; where texts come one by one, summed over
        them, each from its coming to its end."""
        texts = [
            self.machine.text(
                tokens, 1000 * seed + place, comes=self.every * place, reading=self.reading
            )
            for place, tokens in enumerate(self.tokens)
        ]
        decoding = Decoding(
            self.machine,
            lengths,
            texts,
            seed,
            size=self.size,
            joins_at=0.0 if self.every else JOINS_AT,
        )
        decoding.run()
        return decoding.waited if self.every else decoding.clock

    def fixed(self, seeds: int, files: int = 1) -> dict[int, float]:
        """The mean time of each of some lengths."""
        places = [seed + 1000 * file for seed in range(seeds) for file in range(files)]
        return {
            n: sum(self.time(FixedLength(n), place) for place in places) / len(places)
            for n in (0, 1, 2, 3, 5, 8)
        }

    def auto(self, seeds: int, files: int) -> list[float]:
        """The mean time of each of so many files in a row, which teach one another."""
        sums = [0.0] * files
        for seed in range(seeds):
            knowledge, _ = self.machine.calibrated(seed, self.size)
            for file in range(files):
                lengths = AutoLength(self.machine.sources, knowledge)
                sums[file] += self.time(lengths, seed + 1000 * file)
                knowledge = {**knowledge, **lengths.knowledge}
        return [total / seeds for total in sums]
