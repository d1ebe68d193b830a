"""The choice of the draft length, from the chance that draft tokens are accepted and the costs of
rounds.

Let chances[i] be the probability that draft tokens 0 .. i are all accepted. A round with n draft
tokens then brings 1 + chances[0] + ... + chances[n - 1] tokens on average. `values` divides this by
the round's cost. Everything that weighs drafts against their cost calls it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from .. import system
from ..results import Step
from ..types import Proposal
from .proposer import LONGEST_DRAFT, Drafter, Prices
from .row import Row
from .statistics import Timed

CHOICE_INTERVAL, TRIAL_ROUNDS = 8, 3
"""Rounds between two choices, and rounds in which another draft length is tried. Of three plain
steps that are tried, only the second one is timed."""
FIRST_TRIAL, TRIAL_INTERVAL = 16, 64
"""Rounds between two trials: FIRST_TRIAL, then 2 FIRST_TRIAL, ... up to TRIAL_INTERVAL. While plain
decoding is best for a group, this is multiplied by the number of rows, because a trial of drafts
costs more there."""
BETTER = 1.03
"""In a group, drafting must be 3 % better than plain decoding for each doubling of the rows. They
end at different times, and a row that has ended costs more in rounds with drafts."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is not used, judged by the cost ratio of one
draft token. A round that takes longer than this calls for a new choice at once."""
EXPECTED, PRIOR_WEIGHT, REMEMBERED_ROUNDS = 0.7, 8.0, 512
"""Acceptance rate before anything was verified, its weight in tokens, and the rounds after which
the weight of a verified token has fallen to 1/e. The drafts in weights/ reach 0.6 to 0.8. The rate
of all positions together has the same weight in the rate of each position."""
RISE, LINE_WEIGHT = 0.25, 8.0
"""Plain steps that a draft token of a single row is assumed to cost before any round was timed; in
a group, half as much more for each doubling of the rows. The line through all costs weighs as much
as LINE_WEIGHT rounds in the cost of each draft length."""
HEAVIEST, AGED, LEAST_WEIGHT = 20.0, 0.99, 1.5
"""The largest weight of timed rounds, the factor by which `Costs.fit` reduces all weights, and the
weight from which costs count: the first round may have stalled."""
STALL = 1.0
"""A round that takes more than 1 + STALL times the expected seconds counts as 1 + STALL times them.
If it takes less than 1 - STALL / 2 times the mean of one or two earlier rounds, these have
stalled."""
TIMING_NOISE = 0.3
"""Standard deviation of the logarithm of a single round's seconds."""
SMALL_BACKLOG, LONG_PROMPT, PREFILLED = 16, 64, 0.1
"""SMALL_BACKLOG is the number of tokens that a proposer can prefill before a draft without a
noticeable delay. LONG_PROMPT is the longest prompt that it prefills before the first output token.
PREFILLED is the cost of one token of its prefill, in draft tokens."""
COSTS_FORMAT = 5
"""The layout of the files. It is part of their names, so that other layouts are not read."""
WRITE_EVERY = 10.0
"""Seconds between two writes of a file, because a write takes as long as a round of a small pair.
The end of a process loses the rounds after the last write."""
PLAIN = "", 0
"""Plain decoding, as a name and a draft length."""


def values(chances: Sequence[float], costs: Sequence[float]) -> Iterator[float]:
    """Yield the expected tokens per cost of rounds with 0, 1, ... draft tokens.

    Args:
        chances: Entry i is the probability that draft tokens 0 .. i are all accepted.
        costs: Entry n is the cost of a round with n draft tokens."""
    tokens = accumulate(chances, initial=1.0)
    return (count / cost for count, cost in zip(tokens, costs, strict=False))


class Memory:
    """The costs and acceptance rates of one pair. All its completions change them in place.

    Attributes:
        entries: Lists of numbers by name, as the file has them.
        rounds: How many rounds of each kind this process has run; never saved.
        tables: Opened tables of costs by batch size and context; never saved."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file at `path`, which counts as empty if it cannot be read. None keeps nothing
        for other processes."""
        self.entries: dict[str, list[Any]] = {}
        self.rounds: Counter[tuple[str | int, ...]] = Counter()
        self.tables: dict[tuple[Any, ...], Costs] = {}
        self._path, self._due = path, 0.0
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self.entries = dict(json.loads(path.read_bytes()))

    def save(self) -> None:
        """Write the file, if that is possible, unless it was written within the last WRITE_EVERY
        seconds."""
        if self._path is not None and self.entries and time.monotonic() >= self._due:
            self._due = time.monotonic() + WRITE_EVERY
            with contextlib.suppress(OSError), system.replacing(self._path) as stream:
                stream.write(json.dumps(self.entries).encode())


_memory = functools.cache(Memory)


def memory(key: Mapping[str, Any]) -> Memory:
    """Return the memory of the pair, device and versions that `key` names. Each has a JSON file in
    the cache directory."""
    named = json.dumps({**key, "format": COSTS_FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(named.encode(), digest_size=16)
    return _memory(system.cache_directory("draft-length") / f"{digest.hexdigest()}.json")


class Acceptance:
    """Decayed counts of verified and of accepted draft tokens by position."""

    def __init__(self, memory: Memory, name: str) -> None:
        default = [[0.0] * LONGEST_DRAFT, [0.0] * LONGEST_DRAFT]
        self.counts = memory.entries.setdefault(f"acceptance {name}", default)

    def add(self, verified: int, accepted: int) -> None:
        """Count a draft. Tokens after the first rejected one were not verified."""
        for position in range(min(verified, accepted + 1, LONGEST_DRAFT)):
            self.counts[0][position] += 1
            self.counts[1][position] += position < accepted

    def chances(self) -> list[float]:
        """Return for n = 1 .. LONGEST_DRAFT the probability that the first n draft tokens are
        accepted."""
        verified, accepted = np.array(self.counts)
        rate = (accepted.sum() + PRIOR_WEIGHT * EXPECTED) / (verified.sum() + PRIOR_WEIGHT)
        rates = (accepted + PRIOR_WEIGHT * rate) / (verified + PRIOR_WEIGHT)
        chances: list[float] = np.cumprod(rates).tolist()
        return chances


class Costs:
    """Costs of rounds in groups of one size, after contexts of one length. An entry has the usual
    seconds of a round, and the weight of the timed rounds.

    Attributes:
        timed: An entry for each draft length of each `Drafter.costs`. "" is the key of plain steps.
        trials: Rounds until the next trial, and how often a trial was due.
        ratios: Costs of draft lengths 0 .. LONGEST_DRAFT in plain steps; see `fit`."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved costs. If there are none, copy the costs of twice or half the size, after
        contexts that are not longer, with little weight.

        Args:
            doublings: 0 for contexts of less than 1,024 tokens, 1 from there, and one more whenever
                the context doubles.
            names: `Drafter.costs` of all proposers."""
        place = f"trials of {rows} rows, {doublings} doublings"
        self.trials = memory.entries.setdefault(place, [FIRST_TRIAL, 0])
        self.timed: dict[str, list[list[float]]] = {}
        self._rise = RISE * (1 + math.log2(rows) / 2)
        for name in ("", *names):
            keys = [
                f"costs of {name}, {n} rows, {more} doublings"
                for n in (rows, 2 * rows, rows // 2)
                for more in range(doublings, -1, -1)
            ]
            saved = (memory.entries[key] for key in keys if key in memory.entries)
            timed = (entries for entries in saved if any(weight for _, weight in entries))
            unknown = [[1.0, 0.0]] * (LONGEST_DRAFT + 1)
            copied = [[cost, min(weight, 1.0)] for cost, weight in next(timed, unknown)]
            self.timed[name] = memory.entries.setdefault(keys[0], copied)
        self.plain = self.timed[""][0]
        self.ratios: dict[str, list[float]] = {}
        self.fit()

    def known(self, name: str) -> bool:
        """Return whether the costs of a proposer, or of plain steps, count: as a rule, two rounds
        were timed."""
        return sum(weight for _, weight in self.timed[name]) > LEAST_WEIGHT

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round of a proposer, or from a plain step if `drafted` is 0."""
        entry = self.timed[name if drafted else ""][drafted]
        usual, weight = entry
        if weight == 0 or (weight < 3 and seconds < (1 - STALL / 2) * usual):
            entry[0] = seconds
        else:
            entry[0] += (min(seconds, (1 + STALL) * usual) - usual) / (1 + weight)
        entry[1] = min(weight + 1, HEAVIEST)
        if not drafted and weight < LEAST_WEIGHT:  # the others were copied, and keep their ratios
            for other in chain(*(self.timed[name] for name in self.timed if name)):
                other[0] *= entry[0] / usual

    def fit(self) -> None:
        """Let earlier rounds lose some weight, and compute `ratios`. A ratio is the weighted mean
        of the length's own timings and of the line that fits all lengths best. The line begins as
        1 + RISE n for a single row. Costs that are not `known` do not count."""
        for entry in chain(*self.timed.values()):
            entry[1] *= AGED
        # Two points of the first line have half the weight of a round each. The noise of a round
        # grows with its seconds.
        lengths = np.arange(1, LONGEST_DRAFT + 1)
        n = np.append(lengths, [1, LONGEST_DRAFT])
        first = 1 + self._rise * n
        for name in self.timed.keys() - {""}:
            timed, weights = np.array(self.timed[name][1:]).T
            timed, weights = timed / self.plain[0], weights * self.known(name)
            ratio = np.append(timed, first[-2:])
            weight = np.append(weights, [0.5, 0.5]) / first**2
            weight /= weight.sum()
            middle, height = weight @ n, weight @ ratio
            slope = weight @ ((n - middle) * (ratio - height)) / (weight @ (n - middle) ** 2)
            line = np.maximum(1.0, height + max(0.0, slope) * (lengths - middle))
            ratios = (weights * timed + LINE_WEIGHT * line) / (weights + LINE_WEIGHT)
            self.ratios[name] = [1.0, *ratios.tolist()]


@dataclass
class _Size:
    """The decisions for groups of one size, a power of two.

    Attributes:
        limits: The draft lengths of the proposers that may draft.
        rate: Tokens per plain step's time of the best choice, which a trial does not change; for
            plain decoding in a batch, what drafts must reach.
        due: Rounds until the next choice.
        in_flight: Whether the newest round has submitted the pass of the next one.
        idle: Choices since a free proposer drafted in a group.
        refill: In a group, prompt tokens of the rows that replace ended ones, per plain step."""

    rows: int
    costs: Costs
    limits: dict[str, int] = field(default_factory=dict)
    rate: float = 1.0
    due: int = 0
    in_flight: bool = False
    idle: int = 0
    refill: float = 0.0


class Worth:
    """The choice of the draft length of one pair: a fixed one, or every few rounds the one that
    promises the most tokens per second. Proposers without weights come first, and decide with
    `prices` what to propose. It reads no clock.

    Args:
        fixed: The draft length, or None to choose it.
        drafters: The drafters in the order in which they propose.
        memory: The saved costs and acceptance of the pair, which are changed in place."""

    def __init__(
        self,
        fixed: int | None = None,
        drafters: Sequence[Drafter] = (),
        memory: Memory | None = None,
    ) -> None:
        self._fixed = fixed
        self.memory = memory or Memory()
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._paid = [drafter for drafter in drafters if not drafter.free]
        self._acceptance = {one.name: Acceptance(self.memory, one.text) for one in self._paid}
        self._backlog = dict.fromkeys(self._acceptance, 0.0)
        self._sizes: dict[int, _Size] = {}
        self._newest: _Size | None = None
        self._learned = 0

    def choose(self, remaining: int, rows: int = 1) -> int:
        """Return the draft length of the next round, at most remaining - 1; 0 means a plain
        decoding step. remaining: The number of tokens that a row may still emit, at least 1."""
        most = max(self.size(rows).limits.values(), default=0)
        return max(0, min(most, remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        """Return how many tokens the named proposer may draft, at most `most`."""
        return min(most, self.size(rows).limits.get(name, 0))

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        """Return the costs of rounds of the named proposer, None if it must not use them."""
        if self._fixed is not None:
            return None
        size = self.size(rows)
        return Prices(size.costs.ratios[self._drafters[name].costs], size.rate)

    def verified(self, name: str) -> tuple[float, float]:
        """Return the decayed numbers of verified and of accepted draft tokens of a proposer with
        weights. Tokens after the first rejected one were not verified."""
        verified, accepted = map(sum, self._acceptance[name].counts)
        return verified, accepted

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        """Prepare for a row that is decoded alone.

        Args:
            context: The number of committed tokens.
            prompt: The number of prompt tokens that a proposer has to prefill.
            remaining: The number of tokens that may be emitted."""
        size = self.size(1)
        # A proposer that drafts later prefills the prompt then. This counts as a prefill even if
        # the prompt is short, because the proposer opens its cache.
        self._backlog = dict.fromkeys(self._backlog, max(prompt, SMALL_BACKLOG + 1.0))
        self._choose(size, context, remaining)
        if self._fixed is None and prompt > LONG_PROMPT:
            size.limits, size.due = size.limits | dict.fromkeys(self._backlog, 0), 1
        self._backlog |= {name: 0.0 for name in self._backlog if size.limits.get(name)}

    def learn(
        self, rows: Sequence[Row], steps: Sequence[Step], proposal: Proposal, timed: Timed
    ) -> None:
        """Learn from a finished round of these rows, and choose again if that is due. steps: The
        step of each row."""
        if not self._drafters:
            return
        # A proposal has no source if there is only one proposer.
        first = self._drafters.get(proposal.source) or next(iter(self._drafters.values()))
        count = len(rows)
        size = self._newest = self.size(count)
        self._learned += 1
        if self._learned % CHOICE_INTERVAL == 0:  # verdicts lose some weight
            left = 1 - CHOICE_INTERVAL / REMEMBERED_ROUNDS
            for acceptance in self._acceptance.values():
                acceptance.counts[:] = (np.array(acceptance.counts) * left).tolist()
        for step in steps:
            drafter = self._drafters.get(step.proposer, first)
            if step.drafted and not drafter.free:
                # If the proposer stopped early, the token that it left out counts as rejected. If
                # a draft token ends the row, it also does, because no token follows it.
                stopped = drafter.stops and step.finish_reason is None
                stopped = stopped and step.drafted < size.limits.get(drafter.name, 0)
                accepted = min(step.accepted, len(step.tokens) - 1)
                self._acceptance[drafter.name].add(step.drafted + stopped, accepted)
        if self._fixed is not None:
            return
        size.due -= 1
        size.costs.trials[0] -= 1
        size.idle = 0 if proposal.size and first.free else size.idle
        self._time(size, first, proposal.size, timed)
        added = 1 + sum(step.accepted for step in steps) / count
        for name in self._backlog:
            proposed = proposal.size and name == first.name
            self._backlog[name] = 0.0 if proposed else self._backlog[name] + added
        if size.due <= 0:
            size.costs.fit()
            context = sum(len(row.committed) for row in rows) // count
            prompt = sum(len(row.prompt) for row in rows) / count
            remaining = sum(row.remaining for row in rows) / count
            size.refill = (count > 1) * count * prompt / max(1, context - prompt + remaining)
            self._choose(size, context, remaining)

    def _time(self, size: _Size, drafter: Drafter, drafted: int, timed: Timed) -> None:
        """Learn from the seconds of a round. Rounds in which the proposer prefilled do not count,
        nor the first one of a kind in a process, which may have compiled kernels."""
        kind = (drafter.costs if drafted else "", drafted, size.rows)
        self.memory.rounds[kind] += 1
        # The first plain step after a draft takes the time of two passes, and the last one none.
        steady = timed.pipelined and size.in_flight
        if drafted:
            steady = self._backlog.get(drafter.name, 0.0) <= SMALL_BACKLOG
        size.in_flight = timed.pipelined
        known = self.memory.rounds[kind] > 1 and drafted <= LONGEST_DRAFT
        if timed.interval is not None and steady and known:
            if drafted and drafter.stops:
                drafted = max(drafted, size.limits.get(drafter.name, 0))
            size.costs.add(drafter.costs, drafted, max(timed.interval, 1e-9))
            if timed.interval > size.costs.plain[0] * (1 + TOO_EXPENSIVE * max(1, drafted)):
                size.due = 0

    def size(self, rows: int) -> _Size:
        """Return the decisions for groups of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            self._sizes[rounded] = size = _Size(rounded, self._costs(rounded, 0))
            self._choose(size, tries=False)
        return self._sizes[rounded]

    def _costs(self, rows: int, doublings: int) -> Costs:
        place = rows, doublings, tuple({drafter.costs: 0 for drafter in self._drafters.values()})
        if place not in self.memory.tables:
            self.memory.tables[place] = Costs(self.memory, *place)
        return self.memory.tables[place]

    def _choose(
        self, size: _Size, context: int = 0, remaining: float = math.inf, tries: bool = True
    ) -> None:
        """Choose the draft lengths of the next rounds. A trial may be due."""
        if self._fixed is not None:
            size.limits = dict.fromkeys(self._drafters, self._fixed)
            return
        costs = size.costs = self._costs(size.rows, max(0, context.bit_length() - 10))
        size.limits, size.due = {}, CHOICE_INTERVAL
        if not costs.known(""):
            size.due = 1
            return
        rates = {PLAIN: BETTER ** math.log2(size.rows)}
        for drafter in self._paid:
            rates |= self._rates(size, drafter, remaining)
        best = max(rates, key=rates.__getitem__)
        size.rate = rates[best]
        if tries and costs.trials[0] <= 0:
            costs.trials[1] += 1
            slower = size.rows if best == PLAIN else 1
            costs.trials[0] = slower * min(TRIAL_INTERVAL, FIRST_TRIAL * costs.trials[1])
            if (tried := self._trial(costs, rates, best)) != best:
                best, size.due = tried, TRIAL_ROUNDS
        if best != PLAIN:
            size.limits = dict([best])
        size.idle += 1
        # The search for every row of a batch takes time even if it finds nothing.
        if size.rows == 1 or size.idle % (TRIAL_INTERVAL // CHOICE_INTERVAL) == 1:
            size.limits |= {one.name: one.most for one in self._drafters.values() if one.free}

    def _rates(
        self, size: _Size, drafter: Drafter, remaining: float
    ) -> dict[tuple[str, int], float]:
        """Return the expected tokens per plain step's time by draft length of a proposer. The
        time includes the prefill of rows that replace ended ones. If the proposer has yet to
        prefill tokens, only lengths that gain this time are included."""
        costs, backlog = size.costs, self._backlog[drafter.name]
        ratios = costs.ratios[drafter.costs]
        token = PREFILLED * (ratios[1] - 1)
        prefill = token * backlog if backlog > SMALL_BACKLOG else 0.0
        # The first drafts have one token, because the proposer may be hopelessly slow.
        longest = drafter.most if costs.known(drafter.costs) else 1
        longest *= ratios[1] <= 1 + TOO_EXPENSIVE
        chances = self._acceptance[drafter.name].chances()
        rates = (1 / (1 / rate + token * size.refill) for rate in values(chances, ratios))
        return {
            (drafter.name, length): rate
            for length, rate in islice(enumerate(rates), 1, longest + 1)
            if prefill <= max(0.0, remaining * (1 - 1 / rate))
        }

    def _trial(
        self, costs: Costs, rates: dict[tuple[str, int], float], best: tuple[str, int]
    ) -> tuple[str, int]:
        """Return the proposer and the draft length to try. While drafts are best, every second
        trial is plain decoding, which all costs are relative to. Otherwise, it is the most
        promising draft length whose costs are uncertain, or `best` if none may be better."""
        if best != PLAIN and costs.trials[1] % 2:
            return PLAIN
        hopes = dict(rates)
        for name, length in rates.keys() - {best, PLAIN}:
            weight = costs.timed[self._drafters[name].costs][length][1]
            hopes[name, length] *= math.exp(TIMING_NOISE / math.sqrt(1 + weight))
        return max(hopes, key=hopes.__getitem__)

    @property
    def reason(self) -> str:
        """The reason for the draft length, in one line."""
        if self._fixed is not None:
            return f"the draft length is fixed at {self._fixed}"
        size = self._newest
        if size is None or not size.costs.known(""):
            return "the draft length is 0 until plain steps were timed"
        plain = 1 / size.costs.plain[0]
        said = f"plain decoding: {1000 / plain:.1f} ms per round, {plain:.0f} tokens/s"
        for drafter in self._paid:
            chances = self._acceptance[drafter.name].chances()
            limit = size.limits.get(drafter.name, 0)
            rate = plain * list(values(chances, size.costs.ratios[drafter.costs]))[limit]
            said += f"; {drafter.name or 'draft'}: {limit} draft tokens, {rate:.0f} tokens/s; "
            said += f"the first is accepted with probability {chances[0]:.2f}"
        return said
