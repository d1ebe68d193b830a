"""The draft length that promises the most tokens per second, learned from rounds.

A candidate is plain decoding, or one proposer that has weights with one draft length. The candidate
with the most expected tokens per plain step's time drafts, and old candidates are tried again in
turn. Proposers without weights come first and decide with `prices` what to propose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..interfaces import Prices
from ..interfaces.results import RoundReport
from .length import DraftLength
from .saved import Memory

MOST = 16
"""The longest draft whose rounds are timed, in tokens."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, MOST)
"""Draft lengths that can be chosen. Fewer candidates are learned faster."""
EVERY = 8
"""Rounds between two choices. A choice takes about 0.1 ms."""
MARGIN = 1.03
"""A candidate must be 3 % better than the present one. In a batch, drafting must in addition be 3 %
better than plain decoding for each doubling of the rows, because rows end at different times."""
EXPLORE = 64
"""Rounds between two trials of old candidates. The first trials come sooner."""
OLD = 512
"""Rounds after which a timing counts little, and plain decoding is tried whatever a draft gains."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is dropped after its first round."""
EXPECTED, PRIOR = 0.7, 8.0
"""Acceptance rate before anything was verified, and its weight in tokens. Shipped drafts have 0.6
to 0.8. Each position has the mean over all positions as its prior, with the same weight."""
REMEMBERED, FORGOTTEN = 100, 2048
"""Rounds after which a draft's weight has fallen to 1/e, while its proposer drafts or does not."""
LOSS = 1.0
"""Plain steps that a round of a trial may be expected to lose."""
NOISE = 0.2
"""Standard deviation of the logarithm of a single round's seconds."""
STALL = 0.5
"""Largest logarithm of a round's seconds over the expected ones that counts in full."""
LEAST_GAIN, COMMON = 0.05, 0.2
"""Shares of an unexpected duration. At least the first share changes the cost of the candidate. The
second share of the rest changes the seconds of a plain step, since the whole machine is slower."""
UNREAD = 16
"""Tokens that a proposer can prefill before a draft without a noticeable delay."""
LONG_PROMPT = 64
"""Length of a prompt, in tokens, above which proposers prefill it only after the first output
token. A draft model with an eighth of the target's layers would delay that token by a tenth."""
RISE = {True: 0.1, False: 0.25}
"""Plain steps per draft token before any round was timed, by `Source.free`."""


@dataclass(frozen=True)
class Source:
    """A proposer, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        most: The proposer's longest draft, in tokens.
        free: Whether drafting takes no time.
        stops: Whether the proposer shortens its drafts by `prices`.
        costs: Name under which its costs are saved.
        text: Name under which its acceptance is saved."""

    name: str = ""
    most: int = MOST
    free: bool = False
    stops: bool = False
    costs: str = "draft"
    text: str = "draft"


class Acceptance:
    """Decayed counts of verified and of accepted draft tokens by position."""

    def __init__(self, memory: Memory, name: str) -> None:
        default = [[0.0] * MOST, [0.0] * MOST]
        self._counts = memory.entries.setdefault(f"acceptance {name}", default)

    def add(self, verified: int, accepted: int) -> None:
        """Count a draft. Tokens after the first rejected one were not verified."""
        for position in range(min(verified, accepted + 1, MOST)):
            self._counts[0][position] += 1
            self._counts[1][position] += position < accepted

    def fade(self, share: float) -> None:
        """Take this share from the weight of all earlier drafts."""
        self._counts[:] = [[(1 - share) * count for count in row] for row in self._counts]

    def chances(self, luck: float = 0.0) -> list[float]:
        """Return the probability that the first 1 .. MOST draft tokens are accepted, if each
        position is better than its counts say by `luck` standard errors."""
        verified, accepted = self._counts
        mean = (sum(accepted) + PRIOR * EXPECTED) / (sum(verified) + PRIOR)
        reached, chances = 1.0, []
        for tried, right in zip(verified, accepted, strict=True):
            rate = (right + PRIOR * mean) / (tried + PRIOR)
            reached *= min(1.0, rate + luck * math.sqrt(rate * (1 - rate) / (tried + PRIOR)))
            chances.append(reached)
        return chances


class CostTable:
    """Seconds of rounds in batches of one size, after contexts of one length.

    The logarithm of a round's seconds is the speed of the machine, which all rounds share, plus the
    cost of the candidate. The entry of a proposer and a draft length is [cost, weight of the timed
    rounds, number of the newest timed round]; plain decoding has one entry.

    Attributes:
        state: The speed, the number of rounds, and the number of the newest trial's round.
        plain: The entry of plain decoding."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved table, or begin with the nearest one's costs and little weight. names:
        `Source.costs` of all proposers. doublings: How often the context doubled beyond 1,024
        tokens."""

        def opened(name: str, default: list[Any]) -> list[Any]:
            entries, key = memory.entries, f"{name}, {rows} rows, {doublings} doublings"
            if key not in entries:
                near = [
                    entries.get(f"{name}, {1 << n} rows, {more} doublings")
                    for n in sorted(range(10), key=lambda n: abs((1 << n) - rows))
                    for more in range(doublings, -1, -1)
                ]
                copied = next(filter(None, near), default)
                default = [[entry[0], min(entry[1], 1.0), 0] for entry in copied]
            return entries.setdefault(key, default)

        self.state = memory.entries.setdefault(f"{rows} rows, {doublings} doublings", [0.0, 0, 0])
        self._entries = {"": opened("plain", [[0.0, 0, 0]])}
        untimed = [[0.0, 0, 0] for _ in range(MOST + 1)]
        self._entries |= {name: opened(name, untimed) for name in names}
        self.plain = self._entries[""][0]

    @property
    def seconds(self) -> float:
        """Seconds of a plain step."""
        return math.exp(self.state[0] + self.plain[0])

    def entry(self, name: str, drafted: int) -> list[Any]:
        """Return the entry of a proposer and a draft length, or of plain decoding if it is 0."""
        return self._entries[name][drafted]

    def timed(self, name: str) -> float:
        """Return the weight of all timed rounds of a proposer."""
        return sum(entry[1] for entry in self._entries[name])

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round."""
        entry, state = self.entry(name, drafted), self.state
        error = math.log(seconds) - entry[0] - state[0]
        entry[1] = min(entry[1], 2.0) if state[1] - entry[2] > OLD else entry[1]
        # A far shorter round than the first ones shows that these stalled.
        new = not entry[1] or (entry[1] < 3 and error < -STALL)
        error = error if new else min(error, STALL)
        gain = 1.0 if new else max(LEAST_GAIN, 1 / (1 + entry[1]))
        entry[0] += gain * error
        state[0] += COMMON * (1 - gain) * error
        entry[1:] = min(entry[1] + 1, 1 / LEAST_GAIN), state[1]

    def costs(self, source: Source, name: str = "") -> list[float]:
        """Return the cost ratios of draft lengths 0 .. MOST. Those that were not timed lie on the
        line between those that were."""
        rise, points = RISE[source.free], [(0, 1.0)]
        for drafted, (cost, weight, _) in enumerate(self._entries[name or source.costs]):
            if weight:
                ratio = math.exp(cost - self.plain[0])
                before, points = points[-1], [*points, (drafted, ratio)]
                rise = max(0.02, (points[-1][1] - before[1]) / (drafted - before[0]))
        costs, last = [1.0], points[-1]
        for (low, first), (high, second) in pairwise(points):
            step = (second - first) / (high - low)
            costs += [first + step * (n - low) for n in range(low + 1, high + 1)]
        return costs + [last[1] + rise * (n - last[0]) for n in range(last[0] + 1, MOST + 1)]


@dataclass
class _Size:
    """The decisions for batches of one size, a power of two.

    Attributes:
        limits: The draft length of each proposer.
        prices: `AutoLength.prices` of each proposer that uses them.
        rate: Tokens per plain step's time of the chosen candidate.
        due: Rounds until the next choice.
        trial: Whether an old candidate is being tried.
        plain_steps: Plain steps since the last draft.
        idle: Choices since a free proposer drafted in a batch.
        context, remaining: Committed tokens of a sequence, and tokens that may still follow."""

    rows: int
    limits: dict[str, int]
    prices: dict[str, Prices] = field(default_factory=dict)
    table: Any = None
    rate: float = 1.0
    due: int = 0
    trial: bool = False
    plain_steps: int = 0
    idle: int = 0
    context: int = 0
    remaining: float = math.inf


class AutoLength(DraftLength):
    """The draft length of one pair, which is chosen every few rounds."""

    learns = True

    def __init__(
        self,
        sources: Sequence[Source] = (Source(),),
        memory: Memory | None = None,
        survey: Sequence[int] = (),
    ) -> None:
        """Create the draft length of one request or of many. sources: The proposers in the order in
        which they propose. memory: The saved tables of the pair, which are changed in place.
        survey: Draft lengths that are run in turn, only to time them."""
        self._memory = memory or Memory()
        self._sources = {source.name: source for source in sources}
        self._paid = [source for source in sources if not source.free]
        self._acceptance = {s.name: Acceptance(self._memory, s.text) for s in self._paid}
        self._unread = {source.name: 0.0 for source in self._paid}
        self._dropped: set[str] = set()
        self._sizes: dict[int, _Size] = {}
        self._newest: _Size | None = None
        self._begun, self._survey, self.surveyed = False, survey, 0

    def choose(self, remaining: int, rows: int = 1) -> int:
        return max(0, min(max(self.size(rows).limits.values()), remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        return min(most, self.size(rows).limits[self._named(name).name])

    def eager(self, name: str) -> bool:
        return self.size(1).limits[self._named(name).name] > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        return self.size(rows).prices.get(name)

    def save(self) -> None:
        self._memory.save()

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        size = self._sizes.get(1) or self._new_size(1)
        self._begun, size.context, size.remaining = True, context, remaining
        # A proposer also opens its cache before its first draft.
        self._unread = dict.fromkeys(self._unread, max(prompt, UNREAD + 1.0))
        self._dropped.clear()
        self._choose(size)
        if prompt > LONG_PROMPT and not self._survey:
            size.limits, size.due = size.limits | dict.fromkeys(self._unread, 0), 1
        self._unread |= {name: 0.0 for name in self._unread if size.limits[name]}

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again if that is due."""
        rows, source = len(report.sequences), self._named(report.source)
        size = self._newest = self.size(rows)
        size.due -= 1
        size.plain_steps = 0 if report.size or report.drained else size.plain_steps + 1
        size.idle = 0 if report.size and source.free else size.idle
        if not report.drained:
            self._time(size, source, report)
        committed = left = emitted = 0
        for row in report.sequences:
            committed += len(row.committed)
            left += row.left
            # The proposers of a row that has joined a batch have not prefilled its prompt.
            joined = row.position == 0 and not self._begun
            emitted += len(row.committed) if joined else row.accepted + 1
            drafter = self._sources.get(row.source, source)
            if row.drafted and not drafter.free and not self._survey:
                # A token at which the proposer stopped counts as rejected, and so does one after
                # the end of the sequence.
                stopped = drafter.stops and not row.ended
                stopped = stopped and row.drafted < size.limits[drafter.name]
                accepted = min(row.accepted, row.emitted - 1)
                self._acceptance[drafter.name].add(row.drafted + stopped, accepted)
        size.context, size.remaining = committed // rows, left / rows
        for name in self._unread:
            drafted = report.size and name == source.name
            self._unread[name] = 0.0 if drafted else self._unread[name] + emitted / rows
        if size.due <= 0:
            self._choose(size)

    def _time(self, size: _Size, source: Source, report: RoundReport) -> None:
        """Learn from the seconds of a round."""
        drafted, seconds, table = report.size, max(report.times.total, 1e-9), size.table
        table.state[1] += 1
        name, rounds = source.costs if drafted else "", self._memory.rounds
        kind = (name, drafted, size.rows)
        rounds[kind] += 1
        # The first round of a kind compiles kernels.
        first, unread = rounds[kind] == 1, self._unread.get(source.name, 0.0)
        if not drafted:
            # The first plain step after a draft fills the pipeline.
            if size.plain_steps > 1 and not first:
                table.add(name, 0, seconds)
        elif drafted <= MOST and table.plain[1]:
            steps = seconds / table.seconds
            if unread > UNREAD and not first:
                excess = max(0.0, steps - table.costs(source)[drafted]) / unread
                last = self._memory.entries.get(f"reading {source.costs}", [excess])
                self._memory.entries[f"reading {source.costs}"] = [(last[0] + excess) / 2]
            elif unread <= UNREAD:
                asked = size.limits[source.name] if source.stops else drafted
                if not first:
                    table.add(name, asked, seconds)
                    if source.stops:
                        table.add(f"{name}, drafted", drafted, seconds)
                new = table.timed(source.costs) < 2 and not source.free
                if new and steps > 1 + TOO_EXPENSIVE * drafted:
                    self._dropped.add(source.name)
                if table.entry(name, asked)[1] < 3 and not size.trial:
                    size.due = 0

    def _named(self, name: str) -> Source:
        """Return the proposer with this name. Reports have an empty name if there is only one."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def size(self, rows: int) -> _Size:
        """Return the decisions for batches of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            self._choose(self._new_size(rounded))
        return self._sizes[rounded]

    def _new_size(self, rows: int) -> _Size:
        size = self._sizes[rows] = _Size(rows, dict.fromkeys(self._sources, 0))
        return size

    def _reading(self, size: _Size, source: Source) -> float:
        """Return the plain steps that the proposer's outstanding prefill takes."""
        unread = self._unread[source.name]
        timed = self._memory.entries.get(f"reading {source.costs}", [0.0])
        return unread * timed[0] if unread > UNREAD else 0.0

    def _rates(self, size: _Size, source: Source, luck: float = 0.0) -> list[float]:
        """Return the expected tokens per plain step's time of each draft length."""
        tokens, rates = 1.0, [1.0]
        chances, costs = self._acceptance[source.name].chances(luck), size.table.costs(source)
        for chance, cost in zip(chances, costs[1:], strict=True):
            tokens += chance
            rates.append(tokens / cost)
        return rates

    def _choose(self, size: _Size) -> None:
        """Choose the draft lengths of the next rounds."""
        names = {source.costs: None for source in self._sources.values()}
        names |= {f"{source.costs}, drafted": None for source in self._paid if source.stops}
        doublings = max(0, size.context.bit_length() - 10)
        size.table = table = CostTable(self._memory, size.rows, doublings, list(names))
        before, size.due, size.trial, size.prices = size.limits, EVERY, False, {}
        size.idle += 1
        size.limits = dict.fromkeys(self._sources, 0)
        if self._survey:
            drafted = self._survey[self.surveyed % len(self._survey)]
            size.limits = dict.fromkeys(self._sources, drafted)
            size.due, self.surveyed = 1, self.surveyed + 1
            return
        for source in self._paid:
            weight = REMEMBERED if before[source.name] else FORGOTTEN
            self._acceptance[source.name].fade(EVERY / weight)
        if table.plain[1] < 2:
            size.due = 1
            return
        size.rate = MARGIN ** math.log2(size.rows)
        drafting = any(before[source.name] for source in self._paid)
        least, chosen = size.rate * (1.0 if drafting else MARGIN), {}
        for source in self._paid:
            if source.name in self._dropped:
                continue
            rates = self._rates(size, source)
            # A single timed round may have stalled.
            if not (known := table.timed(source.costs) >= 2):
                rates[1] *= table.costs(source)[1] / (1 + RISE[False])
            favored = [*rates]
            favored[before[source.name]] *= MARGIN if before[source.name] else 1.0
            lengths = [n for n in LENGTHS if n <= (source.most if known else 1)]
            length = max(lengths, key=favored.__getitem__)
            gained = size.remaining * (1 - 1 / max(1.0, rates[length]))
            if favored[length] > least and self._reading(size, source) <= gained:
                least, size.rate = favored[length], max(size.rate, rates[length])
                chosen = {source.name: length}
        size.limits |= chosen
        if table.state[1] - table.state[2] >= min(EXPLORE, EVERY + table.state[1] // 4):
            self._explore(size)
        for source in self._sources.values():
            if source.free:
                # In a batch, searching for every row takes time even if nothing is proposed.
                rests = size.rows > 1 and size.idle % (EXPLORE // EVERY) > 1
                size.limits[source.name] = 0 if rests else source.most
                size.prices[source.name] = Prices(table.costs(source), 1 / size.rate)
            elif source.stops and size.limits[source.name] and not size.trial:
                costs = table.costs(source, f"{source.costs}, drafted")
                size.prices[source.name] = Prices(costs, 1 / size.rate)

    def _explore(self, size: _Size) -> None:
        """Try the oldest of the other candidates that could be best."""
        table, hopeful = size.table, []
        # All costs are compared with plain decoding's, which may have been timed in a slow moment.
        old = table.plain[1] < 4 or table.state[1] - table.plain[2] > OLD
        rival = size.rate < (1.5 if table.plain[1] >= EVERY else 2.0)
        if any(size.limits.values()) and (old or rival):
            hopeful.append((-1 if old else table.plain[2], "", 0))
        for source in self._paid:
            if source.name in self._dropped or self._reading(size, source) > EVERY:
                continue
            rates, costs = self._rates(size, source, luck=1.0), table.costs(source)
            for shorter, length in pairwise((0, *LENGTHS)):
                _, weight, last = table.entry(source.costs, length)
                # Assume that a length that was never timed costs as little as the next shorter one.
                optimism = math.exp(NOISE / math.sqrt(weight)) if weight else 1.0
                hope = (
                    optimism * rates[length] * costs[length] / costs[length if weight else shorter]
                )
                lost = costs[length] * (1 - rates[length] / size.rate)
                current = size.limits[source.name] == length
                if length <= source.most and not current and hope > size.rate and lost < LOSS:
                    hopeful.append((last, source.name, length))
        if hopeful:
            _, name, length = min(hopeful)
            size.trial, size.due, table.state[2] = True, 3, table.state[1]
            size.limits = dict.fromkeys(self._sources, 0) | ({name: length} if length else {})

    @property
    def reason(self) -> str:
        size = self._newest
        if size is None or not size.table.plain[1]:
            return "the draft length is 0 until plain steps were timed"
        plain = size.table.seconds
        parts = [f"plain decoding: {1000 * plain:.1f} ms per round, {1 / plain:.0f} tokens/s"]
        for source in self._paid:
            costs, rates = size.table.costs(source), self._rates(size, source)
            lengths = [n for n in LENGTHS if n <= source.most]
            reached = self._acceptance[source.name].chances()[: min(source.most, 8)]
            chances = [f"{chance:.2f}" for chance in reached]
            times = " ".join(f"{1000 * plain * costs[n]:.1f}" for n in lengths)
            speeds = " ".join(f"{rates[n] / plain:.0f}" for n in lengths)
            parts.append(
                f"{source.name or 'draft'}: {size.limits[source.name]} draft tokens, since the "
                f"first 1, 2, ... are accepted with probability {' '.join(chances)}, and "
                f"{', '.join(map(str, lengths))} take {times} ms per round, {speeds} tokens/s"
            )
        return "; ".join(parts)
