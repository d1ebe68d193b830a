"""The draft length that promises the most tokens per second, learned from rounds.

The candidates are plain decoding and the draft lengths of each proposer that has weights. Every few
rounds the best candidate is chosen, and now and then another one is tried. Proposers without
weights come first, and decide with `prices` what to propose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..interfaces import Prices
from ..interfaces.results import RoundReport
from .length import DraftLength
from .saved import Memory

MOST = 16
"""The longest draft of a proposer with weights, in tokens, and the longest that is timed."""
EVERY, TRIED, FIRST, EXPLORE = 8, 3, 16, 64
"""Rounds between two choices, rounds of a trial, rounds before the first trial, and rounds between
two trials. The first trials are FIRST, 2 FIRST, ... rounds apart. In a batch, this is multiplied by
the number of sequences, because a trial costs more there. Of three plain steps of a trial, only the
second one is timed."""
BETTER = 1.03
"""In a batch, drafting must be 3 % better than plain decoding for each doubling of the sequences.
They end at different times, and a row that has ended costs more in rounds with drafts."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is not used, judged by the cost ratio of one
draft token. A round that takes longer than this calls for a new choice at once."""
EXPECTED, PRIOR, REMEMBERED = 0.7, 8.0, 512
"""Acceptance rate before anything was verified, its weight in tokens, and the rounds after which
the weight of a verified token has fallen to 1/e. The drafts in weights/ reach 0.6 to 0.8. The rate
of all positions together has the same weight in the rate of each position."""
RISE, LINE = 0.25, 8.0
"""Plain steps that a draft token is assumed to cost before any round was timed. The line through
all costs weighs as much as LINE rounds in the cost of each draft length."""
HEAVIEST, AGED, KNOWN = 20.0, 0.99, 1.5
"""The largest weight of timed rounds, the factor by which `CostTable.fit` reduces all weights, and
the weight from which costs count: the first round may have stalled."""
NOISE, STALL = 0.3, 1.0
"""Standard deviation of the logarithm of a single round's seconds. If a later round takes
more than 1 + STALL times the expected seconds, it counts as 1 + STALL times them. If it takes less
than 1 - STALL / 2 times the mean of one or two earlier rounds, these have stalled."""
PLAIN = "", 0
"""Plain decoding, as a name and a draft length."""
UNREAD, LONG_PROMPT = 16, 64
"""Tokens that a proposer can prefill before a draft without a noticeable delay, and the longest
prompt that it prefills before the first output token."""


@dataclass(frozen=True)
class Source:
    """A proposer, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        most: The proposer's longest draft, in tokens.
        free: Whether the proposer has no weights.
        stops: Whether a proposer with weights uses `prices` to shorten its drafts.
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

    def chances(self) -> list[float]:
        """Return for n = 1 .. MOST the probability that the first n draft tokens are accepted."""
        verified, accepted = self._counts
        weight = PRIOR * (sum(accepted) + PRIOR * EXPECTED) / (sum(verified) + PRIOR)
        rates = ((a + weight) / (v + PRIOR) for v, a in zip(verified, accepted, strict=True))
        return list(accumulate(rates, lambda reached, rate: reached * rate))


class CostTable:
    """Costs of rounds in batches of one size, after contexts of one length.

    An entry is the logarithm of a round's usual seconds, and the weight of the timed rounds. The
    name of plain steps is "".

    Attributes:
        trials: Rounds until the next trial, and how often a trial was due.
        doublings: 0 for contexts of less than 1,024 tokens, 1 from there, and one more whenever
            the context doubles.
        ratios: Cost ratios of draft lengths 0 .. MOST by `Source.costs`; see `fit`."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved table. If there is none, copy the costs of the nearest size after contexts
        that are not longer, with little weight. The first timed round then scales all of them.
        names: `Source.costs` of all proposers."""
        trials = f"trials of {rows} rows, {doublings} doublings"
        self._copied = trials not in memory.entries
        self.trials = memory.entries.setdefault(trials, [FIRST, 0])
        self.doublings, self._costs = doublings, {}
        self.ratios: dict[str, list[float]] = {}
        for name in ("", *names):
            keys = [
                f"costs of {name}, {1 << n} rows, {more} doublings"
                for n in sorted(range(10), key=lambda n: abs((1 << n) - rows))
                for more in range(doublings, -1, -1)
            ]
            saved = (memory.entries[key] for key in keys if key in memory.entries)
            timed = (costs for costs in saved if any(weight for _, weight in costs))
            costs = next(timed, [[0.0, 0.0]] * (MOST + 1))
            default = [[cost, min(weight, 1.0)] for cost, weight in costs]
            self._costs[name] = memory.entries.setdefault(keys[0], default)
        self.fit()

    @property
    def ready(self) -> bool:
        """Whether enough plain steps were timed to compare drafts with them."""
        return bool(self.entry("", 0)[1] > KNOWN)

    def known(self, name: str) -> bool:
        """Whether the costs of a proposer count: as a rule, two rounds were timed."""
        return sum(weight for _, weight in self._costs[name]) > KNOWN

    @property
    def stale(self) -> bool:
        """Whether many rounds were timed since `fit`, which takes about 0.1 ms."""
        return self._timed >= EVERY

    @property
    def seconds(self) -> float:
        """Usual seconds of a plain step."""
        return math.exp(self.entry("", 0)[0])

    def entry(self, name: str, drafted: int) -> list[Any]:
        """Return the entry of a round; `name` is `Source.costs`."""
        return self._costs[name if drafted else ""][drafted]

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round of a proposer, or from a plain step if `drafted` is 0."""
        entry = self.entry(name, drafted)
        if self._copied:
            self._copied, shift = False, math.log(seconds) - entry[0]
            for entries in self._costs.values():
                for other in entries:
                    other[0] += shift
        excess = seconds / math.exp(entry[0]) - 1
        if entry[1]:
            excess = min(excess, STALL)
        stalled = entry[1] < 3 and excess < -STALL / 2
        entry[0] += math.log1p(excess if stalled else excess / (1 + entry[1]))
        entry[1] = min(entry[1] + 1, HEAVIEST)
        self._timed += 1

    def fit(self) -> None:
        """Let earlier rounds lose some weight, and compute `ratios`. A ratio is the weighted mean
        of the length's own timings and of the line that fits all lengths best. The line begins as
        1 + RISE n. Costs that are not `known` do not count."""
        plain, self._timed = self.entry("", 0)[0], 0
        for name, entries in self._costs.items():
            for entry in entries:
                entry[1] *= AGED
            if not name:
                continue
            known = self.known(name)
            timed = [(math.exp(cost - plain), weight * known) for cost, weight in entries]
            points = [(1, 1 + RISE, 0.5), (MOST, 1 + MOST * RISE, 0.5)]
            points += [(n, *timed[n]) for n in range(1, MOST + 1)]
            # The noise of a round grows with its seconds.
            points = [(n, ratio, weight / (1 + RISE * n) ** 2) for n, ratio, weight in points]
            total = sum(weight for _, _, weight in points)
            middle = sum(weight * n for n, _, weight in points) / total
            height = sum(weight * ratio for _, ratio, weight in points) / total
            slope = sum(weight * (n - middle) * (ratio - height) for n, ratio, weight in points)
            slope = max(0.0, slope / sum(weight * (n - middle) ** 2 for n, _, weight in points))
            self.ratios[name] = ratios = [1.0]
            for n, (ratio, weight) in enumerate(timed[1:], 1):
                line = max(1.0, height + slope * (n - middle))
                ratios.append((weight * ratio + LINE * line) / (weight + LINE))


@dataclass
class _Size:
    """The decisions for batches of one size, a power of two.

    Attributes:
        limits: The draft lengths of the proposers that may draft.
        rate: Tokens per plain step's time of the best candidate, which a trial does not change; for
            plain decoding in a batch, what drafts must reach.
        due: Rounds until the next choice.
        in_flight: Whether the newest round has submitted the pass of the next one.
        idle: Choices since a free proposer drafted in a batch."""

    rows: int
    table: CostTable
    limits: dict[str, int] = field(default_factory=dict)
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

    def choose(self, remaining: int, rows: int = 1) -> int:
        return max(0, min(max(self.size(rows).limits.values(), default=0), remaining - 1))

    def limit(self, name: str, most: int, rows: int = 1) -> int:
        return min(most, self.size(rows).limits.get(self._named(name).name, 0))

    def eager(self, name: str) -> bool:
        return self.limit(name, MOST) > 0

    def prices(self, name: str, rows: int = 1) -> Prices | None:
        size = self.size(rows)
        return Prices(size.table.ratios[self._named(name).costs], 1 / size.rate)

    def save(self) -> None:
        self._memory.save()

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        size = self._sizes.setdefault(1, _Size(1, self._table(1, 0)))
        # A proposer that drafts later prefills the prompt then. This counts as a prefill even if
        # the prompt is short, because the proposer opens its cache.
        self._unread = dict.fromkeys(self._unread, max(prompt, UNREAD + 1.0))
        if size.table.stale:
            size.table.fit()
        self._choose(size, context, remaining)
        if prompt > LONG_PROMPT:
            size.limits, size.due = size.limits | dict.fromkeys(self._unread, 0), 1
        self._unread |= {name: 0.0 for name in self._unread if size.limits.get(name)}

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again if that is due."""
        rows, source = report.sequences, self._named(report.source)
        size = self._newest = self.size(len(rows))
        size.due -= 1
        size.table.trials[0] -= 1
        size.idle = 0 if report.size and source.free else size.idle
        self._time(size, source, report)
        for acceptance in self._acceptance.values():
            acceptance.fade()
        for row in rows:
            drafter = self._sources.get(row.source, source)
            if row.drafted and not drafter.free:
                # If the proposer stopped early, the token that it left out counts as rejected. If
                # a draft token ends the sequence, it also does, because no token follows it.
                stopped = drafter.stops and not row.ended
                stopped = stopped and row.drafted < size.limits.get(drafter.name, 0)
                accepted = min(row.accepted, row.emitted - 1)
                self._acceptance[drafter.name].add(row.drafted + stopped, accepted)
        if size.due <= 0:
            size.table.fit()
            context = sum(len(row.committed) for row in rows) // len(rows)
            self._choose(size, context, sum(row.left for row in rows) / len(rows))

    def _time(self, size: _Size, source: Source, report: RoundReport) -> None:
        """Learn from the seconds of a round."""
        drafted, seconds = report.size, max(report.times.total, 1e-9)
        table, unread = size.table, self._unread.get(source.name, 0.0)
        kind = (source.costs if drafted else "", drafted, size.rows)
        self._memory.rounds[kind] += 1
        if report.ended and report.pipelined:
            seconds *= 2  # the pass in flight is wasted
        # The first plain step after a draft takes the time of two passes, and the last one none.
        steady = drafted or (report.pipelined and size.in_flight)
        size.in_flight = report.pipelined
        # The first round of a kind may have compiled kernels.
        usable = self._memory.rounds[kind] > 1 and drafted <= MOST
        if usable and drafted and unread > UNREAD:
            steps = seconds / table.seconds - table.ratios[source.costs][drafted]
            prefill = self._prefill(source)
            prefill[0] = (prefill[0] + max(0.0, steps / unread)) / 2
        elif usable and steady:
            limit = size.limits.get(source.name, 0) if drafted and source.stops else 0
            length = max(drafted, limit)
            table.add(source.costs, length, seconds)
            if seconds > table.seconds * (1 + TOO_EXPENSIVE * max(1, length)):
                size.due = 0
        rows = report.sequences
        added = 1 + sum(row.accepted for row in rows) / len(rows)
        for name in self._unread:
            proposed = drafted and name == source.name
            self._unread[name] = 0.0 if proposed else self._unread[name] + added

    def _named(self, name: str) -> Source:
        """Return the proposer with this name, or the first one if no proposer has the name."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def size(self, rows: int) -> _Size:
        """Return the decisions for batches of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            self._sizes[rounded] = size = _Size(rounded, self._table(rounded, 0))
            self._choose(size, tries=False)
        return self._sizes[rounded]

    def _table(self, rows: int, doublings: int) -> CostTable:
        names = tuple(dict.fromkeys(source.costs for source in self._sources.values()))
        place = rows, doublings, names
        if place not in self._memory.tables:
            self._memory.tables[place] = CostTable(self._memory, *place)
        return self._memory.tables[place]

    def _prefill(self, source: Source) -> list[float]:
        """Return the saved list whose only number is the plain steps per prefilled token."""
        return self._memory.entries.setdefault(f"prefill of {source.costs}", [0.0])

    def _choose(
        self, size: _Size, context: int = 0, remaining: float = math.inf, tries: bool = True
    ) -> None:
        """Choose the draft lengths of the next rounds. A trial may be due."""
        if (doublings := max(0, context.bit_length() - 10)) != size.table.doublings:
            size.table = self._table(size.rows, doublings)
        table, size.limits, size.due = size.table, {}, EVERY
        if not table.ready:
            size.due = 1
            return
        rates = {PLAIN: BETTER ** math.log2(size.rows)}
        for source in self._paid:
            rates |= self._rates(table, source, remaining)
        best = max(rates, key=rates.__getitem__)
        size.rate = rates[best]
        if tries and table.trials[0] <= 0:
            table.trials[1] += 1
            table.trials[0] = size.rows * min(EXPLORE, FIRST * table.trials[1])
            if (tried := self._trial(table, rates, best)) != best:
                best, size.due = tried, TRIED
        if best != PLAIN:
            size.limits = dict([best])
        size.idle += 1
        # The search for every row of a batch takes time even if it finds nothing.
        if size.rows == 1 or size.idle % (EXPLORE // EVERY) <= 1:
            free = (source for source in self._sources.values() if source.free)
            size.limits |= {source.name: source.most for source in free}

    def _rates(
        self, table: CostTable, source: Source, remaining: float
    ) -> dict[tuple[str, int], float]:
        """Return the expected tokens per plain step's time by draft length of a proposer. If the
        proposer has yet to prefill tokens, only lengths that gain this time are included."""
        unread = self._unread[source.name]
        prefill = unread * self._prefill(source)[0] if unread > UNREAD else 0.0
        rates, tokens = {}, 1.0
        chances = self._acceptance[source.name].chances()
        # The first drafts have one token, because the proposer may be hopelessly slow.
        longest = source.most if table.known(source.costs) else 1
        if table.ratios[source.costs][1] > 1 + TOO_EXPENSIVE:
            longest = 0
        for length in range(1, longest + 1):
            tokens += chances[length - 1]
            rate = tokens / table.ratios[source.costs][length]
            if not prefill or prefill <= remaining * (1 - 1 / rate):
                rates[source.name, length] = rate
        return rates

    def _trial(
        self, table: CostTable, rates: dict[tuple[str, int], float], best: tuple[str, int]
    ) -> tuple[str, int]:
        """Return the candidate to try. While drafts are best, every second trial is plain decoding,
        which all costs are relative to. Otherwise, it is the most promising draft length whose
        costs are uncertain, or `best` if none may be better."""
        if best != PLAIN and table.trials[1] % 2:
            return PLAIN
        hopes = dict(rates)
        for name, length in rates.keys() - {best, PLAIN}:
            weight = table.entry(self._sources[name].costs, length)[1]
            hopes[name, length] *= math.exp(NOISE / math.sqrt(1 + weight))
        return max(hopes, key=hopes.__getitem__)

    @property
    def reason(self) -> str:
        size = self._newest
        if size is None or not size.table.ready:
            return "the draft length is 0 until plain steps were timed"
        plain = size.table.seconds
        parts = [f"plain decoding: {1000 * plain:.1f} ms per round, {1 / plain:.0f} tokens/s"]
        for source in self._paid:
            chances = self._acceptance[source.name].chances()
            parts.append(
                f"{source.name or 'draft'}: {size.limits.get(source.name, 0)} draft tokens"
            )
            for n in (n for n in (1, 2, 3, 4, 6, 8, 11, MOST) if n <= source.most):
                cost, speed = plain * size.table.ratios[source.costs][n], 1 + sum(chances[:n])
                parts.append(
                    f"{n} are accepted with probability {chances[n - 1]:.2f}, "
                    f"{1000 * cost:.1f} ms per round, {speed / cost:.0f} tokens/s"
                )
        return "; ".join(parts)
