"""The draft length that promises the most tokens per second, learned from rounds.

A candidate is plain decoding, or one draft length of a proposer that has weights. The candidate
with the most expected tokens per plain step's time is used, and others are tried now and then.
Proposers without weights come first and decide with `prices` what to propose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..interfaces import Prices
from ..interfaces.results import RoundReport
from .length import DraftLength
from .saved import Memory

MOST = 16
"""The longest draft whose rounds are timed, in tokens."""
EVERY, TRIED = 8, 3
"""Rounds between two choices, and rounds of a trial. A choice takes about 0.1 ms. The first of the
plain steps of a trial fills the pipeline and is not timed."""
EXPLORE = 64
"""Rounds between two trials. The first trials come sooner."""
MARGIN = 1.03
"""A candidate must be 3 % better than the present one. In a batch, drafting must in addition be 3 %
better than plain decoding for each doubling of the rows, because rows end at different times."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is not used."""
EXPECTED, PRIOR = 0.7, 8.0
"""Acceptance rate before anything was verified, and its weight in tokens. The drafts in weights/
reach 0.6 to 0.8. The mean over all positions is the prior of each, with the same weight."""
REMEMBERED = 512
"""Rounds after which the weight of a draft's verdict has fallen to 1/e."""
RISE = {True: 0.1, False: 0.25}
"""Plain steps that each draft token is assumed to cost before any round was timed. The keys are the
values of `Source.free`."""
LINE = 8.0
"""The cost of each draft length is a mean in which the line through the costs of all lengths weighs
as much as this many rounds."""
KNOWN, TIMED = 20.0, 4096
"""The largest weight of timed rounds, and the number of later timed rounds, plain steps included,
after which a weight has fallen to 1/e."""
COMMON = 0.3
"""The share of an unexpected delay that counts as a slower machine instead of a costlier round."""
NOISE, STALL = 0.3, 1.0
"""Standard deviation of the logarithm of a single round's seconds. If a round takes more
than 1 + STALL times the expected seconds, it counts as 1 + STALL times them."""
UNREAD = 16
"""Tokens that a proposer can prefill before a draft without a noticeable delay."""
LONG_PROMPT = 64
"""Length of a prompt, in tokens, above which proposers prefill it only after the first output
token. A draft model with an eighth of the target's layers would delay that token by a tenth."""


@dataclass(frozen=True)
class Source:
    """A proposer, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        most: The proposer's longest draft, in tokens.
        free: Whether drafting takes no time.
        stops: Whether the proposer uses `prices` to shorten its drafts.
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

    def fade(self) -> None:
        """Take away the weight that the verdicts lose in a round."""
        self._counts[:] = [[(1 - 1 / REMEMBERED) * count for count in row] for row in self._counts]

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

    The seconds of a plain step change with the speed of the machine. The table therefore has cost
    ratios for all other rounds. The entry of a proposer and a draft length is [logarithm of the
    cost ratio, weight of the timed rounds]. Entry 0 is the cost of the prefill: [plain steps per
    token, 0].

    Attributes:
        state: The logarithm of a plain step's seconds, the number of timed plain steps, the number
            of rounds until the next trial, and the number of trials.
        doublings: 0 for contexts of less than 1,024 tokens, 1 from there, and one more whenever
            the context doubles."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved table. If there is none, copy the costs of the nearest one, and give them
        little weight. names: `Source.costs` of all proposers."""

        def opened(name: str) -> list[Any]:
            keys = [
                f"costs of {name}, {1 << n} rows, {more} doublings"
                for n in sorted(range(10), key=lambda n: abs((1 << n) - rows))
                for more in range(doublings, -1, -1)
            ]
            near = next((key for key in keys if key in memory.entries), None)
            copied = memory.entries[near] if near else [[0.0, 0.0]] * (MOST + 1)
            default = [[cost, min(weight, 1.0)] for cost, weight in copied]
            return memory.entries.setdefault(keys[0], default)

        self.doublings = doublings
        self.state = memory.entries.setdefault(
            f"{rows} rows, {doublings} doublings", [0.0, 0, EVERY, 0]
        )
        self._entries = {name: opened(name) for name in names}
        self._drafted = ""

    @property
    def seconds(self) -> float:
        """Seconds of a plain step."""
        return math.exp(self.state[0])

    def entry(self, name: str, drafted: int) -> list[Any]:
        """Return the entry of a proposer and a draft length; 0 is its prefill."""
        return self._entries[name][drafted]

    def known(self, name: str) -> bool:
        """Return whether more than one round of a proposer was timed: a single one may have
        stalled."""
        return sum(weight for _, weight in self._entries[name]) > 1.5

    def leave(self) -> None:
        """Note that decoding is plain from now on, so that further plain steps do not change the
        cost ratios of earlier drafts."""
        self._drafted = ""

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round of a proposer, or from a plain step if `drafted` is 0."""
        for entries in self._entries.values():
            for entry in entries:
                entry[1] *= 1 - 1 / TIMED
        state = self.state
        entry = self._entries[name][drafted] if drafted else [0.0, state[1]]
        excess = seconds / math.exp(entry[0] + state[0]) - 1
        # If a round is far shorter than the first ones, those have stalled.
        new = entry[1] < 0.5 or (entry[1] < 3 and excess < -STALL / 2)
        gain = 1.0 if new else 1 / (1 + entry[1])
        excess = excess if new else min(excess, STALL)
        if drafted:
            entry[0] += math.log1p(gain * excess)
            entry[1] = min(entry[1] + 1, KNOWN)
            state[0] += math.log1p(COMMON * (1 - gain) * excess)
            self._drafted = name
        else:
            change = math.log1p(max(gain, COMMON) * excess)
            state[0] += change
            state[1] += 1
            # The seconds of earlier drafts do not change. If plain steps turn out to be faster, the
            # cost ratios of those drafts were higher.
            for entry in self._entries[self._drafted][1:] if self._drafted else ():
                entry[0] -= change

    def costs(self, source: Source) -> list[float]:
        """Return the cost ratios of draft lengths 0 .. MOST. A ratio is the weighted mean
        of the length's own timings and of the line that fits all lengths best."""
        rise, entries = RISE[source.free], self._entries[source.costs]
        ratios = [math.exp(cost) for cost, _ in entries]
        points = [(1, 1 + rise, 0.5), (MOST, 1 + MOST * rise, 0.5)]
        weights = [weight if self.known(source.costs) else 0.0 for _, weight in entries]
        points += [(n, ratios[n], weights[n]) for n in range(1, MOST + 1)]
        # The noise of a round grows with its seconds.
        points = [(n, ratio, weight / (1 + rise * n) ** 2) for n, ratio, weight in points]
        total = sum(weight for _, _, weight in points)
        middle = sum(weight * n for n, _, weight in points) / total
        height = sum(weight * ratio for _, ratio, weight in points) / total
        slope = sum(weight * (n - middle) * (ratio - height) for n, ratio, weight in points)
        slope = max(0.0, slope / sum(weight * (n - middle) ** 2 for n, _, weight in points))
        costs = [1.0]
        for n in range(1, MOST + 1):
            line = max(1.0, height + slope * (n - middle))
            costs.append((weights[n] * ratios[n] + LINE * line) / (weights[n] + LINE))
        return costs


@dataclass
class _Size:
    """The decisions for batches of one size, a power of two.

    Attributes:
        limits: The draft length of each proposer.
        costs: The cost ratios of each proposer's draft lengths.
        rate: Tokens per plain step's time of the chosen candidate.
        due: Rounds until the next choice.
        in_flight: Whether the newest round has submitted the pass of the next one.
        idle: Choices since a free proposer drafted in a batch."""

    rows: int
    table: CostTable
    limits: dict[str, int]
    costs: dict[str, list[float]] = field(default_factory=dict)
    rate: float = 1.0
    due: int = 0
    in_flight: bool = False
    idle: int = 0


class AutoLength(DraftLength):
    """The draft length of one pair, which is chosen every few rounds."""

    learns = True

    def __init__(
        self, sources: Sequence[Source] = (Source(),), memory: Memory | None = None
    ) -> None:
        """Create the draft length of one request or of many. sources: The proposers in the order in
        which they propose. memory: The saved tables of the pair, which are changed in place."""
        self._memory = memory or Memory()
        self._sources = {source.name: source for source in sources}
        self._paid = [source for source in sources if not source.free]
        self._acceptance = {s.name: Acceptance(self._memory, s.text) for s in self._paid}
        self._unread = {source.name: 0.0 for source in self._paid}
        self._sizes: dict[int, _Size] = {}
        self._newest: _Size | None = None
        self._begun = False

    def choose(self, remaining: int, rows: int = 1) -> int:
        return max(0, min(max(self.size(rows).limits.values()), remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        return min(most, self.size(rows).limits[self._named(name).name])

    def eager(self, name: str) -> bool:
        return self.limit(name, MOST) > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        size = self.size(rows)
        return Prices(size.costs[self._named(name).name], 1 / size.rate)

    def save(self) -> None:
        self._memory.save()

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        size, self._begun = self.size(1), True
        # The first draft counts as a prefill even if the prompt is short, because the proposer
        # opens its cache before it.
        self._unread = dict.fromkeys(self._unread, max(prompt, UNREAD + 1.0))
        self._choose(size, context, remaining)
        if prompt > LONG_PROMPT:
            size.limits, size.due = size.limits | dict.fromkeys(self._unread, 0), 1
        self._unread |= {name: 0.0 for name in self._unread if size.limits[name]}

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again if that is due."""
        self.time(report)
        rows, source = len(report.sequences), self._named(report.source)
        size = self._newest = self.size(rows)
        size.due -= 1
        size.table.state[2] -= 1
        size.idle = 0 if report.size and source.free else size.idle
        for acceptance in self._acceptance.values():
            acceptance.fade()
        for row in report.sequences:
            drafter = self._sources.get(row.source, source)
            if row.drafted and not drafter.free:
                # If the proposer stopped early, the token that it left out counts as rejected. A
                # draft token after the end of the sequence also counts as rejected.
                stopped = drafter.stops and not row.ended
                stopped = stopped and row.drafted < size.limits[drafter.name]
                accepted = min(row.accepted, row.emitted - 1)
                self._acceptance[drafter.name].add(row.drafted + stopped, accepted)
        if size.due <= 0:
            committed = sum(len(row.committed) for row in report.sequences) // rows
            self._choose(size, committed, sum(row.left for row in report.sequences) / rows)

    def time(self, report: RoundReport) -> None:
        """Learn from the seconds of a round."""
        rows, drafted, source = len(report.sequences), report.size, self._named(report.source)
        size, seconds = self.size(rows), max(report.times.total, 1e-9)
        table, unread = size.table, self._unread.get(source.name, 0.0)
        kind = (source.costs if drafted else "", drafted, size.rows)
        self._memory.rounds[kind] += 1
        if self._memory.rounds[kind] == 1 or drafted > MOST:
            pass  # the first round of a kind may have compiled kernels
        elif not drafted:
            # The first plain step after a draft fills the pipeline, and the last one empties it.
            if report.pipelined and size.in_flight:
                table.add("", 0, seconds)
        elif table.state[1] and unread > UNREAD:
            entry = table.entry(source.costs, 0)
            excess = seconds / table.seconds - size.costs[source.name][drafted]
            entry[0] = (entry[0] + max(0.0, excess / unread)) / 2
        elif table.state[1]:
            asked = max(drafted, size.limits[source.name]) if source.stops else drafted
            table.add(source.costs, asked, seconds)
            if table.entry(source.costs, asked)[0] > math.log(1 + TOO_EXPENSIVE * asked):
                size.due = 0
        size.in_flight = report.pipelined
        emitted = 0
        for row in report.sequences:
            # The proposers of a row that has joined a batch have not prefilled its prompt.
            joined = row.position == 0 and not self._begun
            emitted += len(row.committed) if joined else row.accepted + 1
        for name in self._unread:
            proposed = drafted and name == source.name
            self._unread[name] = 0.0 if proposed else self._unread[name] + emitted / rows

    def _named(self, name: str) -> Source:
        """Return the proposer with this name. Reports have an empty name if there is only one."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def size(self, rows: int) -> _Size:
        """Return the decisions for batches of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            size = _Size(rounded, self._table(rounded, 0), dict.fromkeys(self._sources, 0))
            self._sizes[rounded] = size
            self._choose(size)
        return self._sizes[rounded]

    def _table(self, rows: int, doublings: int) -> CostTable:
        names = {source.costs: None for source in self._sources.values()}
        return CostTable(self._memory, rows, doublings, list(names))

    def _reading(self, size: _Size, source: Source) -> float:
        """Return the plain steps that the proposer's outstanding prefill takes."""
        unread = self._unread[source.name]
        return unread * size.table.entry(source.costs, 0)[0] if unread > UNREAD else 0.0

    def _lengths(self, size: _Size, source: Source) -> range:
        """Return the draft lengths of a proposer that may be chosen. There is none if it is too
        expensive, and only length 1 until it was timed."""
        if size.costs[source.name][1] > 1 + TOO_EXPENSIVE:
            return range(0)
        return range(1, 1 + (source.most if size.table.known(source.costs) else 1))

    def _rates(self, size: _Size, source: Source, luck: float = 0.0) -> list[float]:
        """Return the expected tokens per plain step's time of each draft length."""
        tokens, rates = 1.0, [1.0]
        chances, costs = self._acceptance[source.name].chances(luck), size.costs[source.name]
        for chance, cost in zip(chances, costs[1:], strict=True):
            tokens += chance
            rates.append(tokens / cost)
        return rates

    def _choose(self, size: _Size, context: int = 0, remaining: float = math.inf) -> None:
        """Choose the draft lengths of the next rounds."""
        if (doublings := max(0, context.bit_length() - 10)) != size.table.doublings:
            size.table = self._table(size.rows, doublings)
        table, before = size.table, size.limits
        size.costs = {name: table.costs(source) for name, source in self._sources.items()}
        size.limits, size.rate, size.due = dict.fromkeys(self._sources, 0), 1.0, EVERY
        size.idle += 1
        if table.state[1] < 2:
            size.due = 1
            return
        size.rate = MARGIN ** math.log2(size.rows)
        drafting = any(before[source.name] for source in self._paid)
        if not drafting:
            table.leave()
        least, chosen = size.rate * (1.0 if drafting else MARGIN), {}
        for source in self._paid:
            rates = self._rates(size, source)
            favored = [*rates]
            favored[before[source.name]] *= MARGIN if before[source.name] else 1.0
            length = max(self._lengths(size, source), key=favored.__getitem__, default=0)
            gained = remaining * (1 - 1 / max(1.0, rates[length]))
            if favored[length] > least and self._reading(size, source) <= gained:
                least, size.rate = favored[length], max(size.rate, rates[length])
                chosen = {source.name: length}
        size.limits |= chosen
        if table.state[2] <= 0:
            self._try(size)
        for source in self._sources.values():
            if source.free:
                # The search for every row of a batch takes time even if it finds nothing.
                rests = size.rows > 1 and size.idle % (EXPLORE // EVERY) > 1
                size.limits[source.name] = 0 if rests else source.most

    def _try(self, size: _Size) -> None:
        """Try plain decoding, which all costs are relative to, or the most hopeful draft length."""
        hopeful, drafting = [(size.rate, "", 0)], any(size.limits.values())
        for source in self._paid:
            if self._reading(size, source) <= EVERY:
                rates = self._rates(size, source, luck=1.0)
                for length in self._lengths(size, source):
                    weight = size.table.entry(source.costs, length)[1]
                    hope = rates[length] * math.exp(NOISE / math.sqrt(1 + weight))
                    if size.limits[source.name] != length:
                        hopeful.append((hope, source.name, length))
        state = size.table.state
        state[3] += 1
        _, name, length = ("", "", 0) if drafting and state[3] % 2 else max(hopeful)
        state[2], size.due = min(EXPLORE, EVERY * state[3]), TRIED if drafting or length else EVERY
        if drafting or length:
            size.limits = dict.fromkeys(self._sources, 0) | ({name: length} if length else {})

    @property
    def reason(self) -> str:
        size = self._newest
        if size is None or not size.table.state[1]:
            return "the draft length is 0 until plain steps were timed"
        plain = size.table.seconds
        parts = [f"plain decoding: {1000 * plain:.1f} ms per round, {1 / plain:.0f} tokens/s"]
        for source in self._paid:
            costs, rates = size.costs[source.name], self._rates(size, source)
            chances = self._acceptance[source.name].chances()
            parts.append(f"{source.name or 'draft'}: {size.limits[source.name]} draft tokens")
            for n in (n for n in (1, 2, 3, 4, 6, 8, 11, MOST) if n <= source.most):
                times = (
                    f"{1000 * plain * costs[n]:.1f} ms per round, {rates[n] / plain:.0f} tokens/s"
                )
                parts.append(f"{n} are accepted with probability {chances[n - 1]:.2f}, {times}")
        return "; ".join(parts)
