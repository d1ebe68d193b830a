"""The draft length that promises the most tokens per second, learned from rounds.

The candidates are plain decoding and the draft lengths of each proposer that has weights. Every few
rounds the best candidate is chosen, and now and then another one is tried. Proposers without
weights come first, and decide with `prices` what to propose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..interfaces import Prices
from ..interfaces.results import RoundReport
from .length import DraftLength
from .saved import Memory

MOST = 16
"""The longest draft whose rounds are timed, in tokens."""
EVERY, TRIED, EXPLORE = 8, 3, 64
"""Rounds between two choices, rounds of a trial, and rounds between two trials. The first trials
come sooner. The first plain step of a trial fills the pipeline and is not timed."""
LOSS = 30
"""Rounds by which the next trial in a batch is put off for each plain step that a trial loses.
Trials then cost about 3 % of the time. A sequence that is decoded alone loses less by a trial than
by a wrong length."""
MARGIN = 1.03
"""A candidate must be 3 % better than the present one. In a batch, drafting must in addition be 3 %
better than plain decoding for each doubling of the rows, because rows end at different times."""
TOO_EXPENSIVE = 3.0
"""Plain steps per draft token above which a proposer is not used, judged by rounds with one draft
token. A round that takes longer than this calls for a new choice at once."""
EXPECTED, PRIOR, REMEMBERED = 0.7, 8.0, 512
"""Acceptance rate before anything was verified, its weight in tokens, and the rounds after which
the weight of a verified token has fallen to 1/e. The drafts in weights/ reach 0.6 to 0.8. The mean
over all positions is the prior of each position, with the same weight."""
RISE, LINE = 0.25, 8.0
"""Plain steps that a draft token is assumed to cost before any round was timed. In the cost of each
draft length, the line through all costs weighs as much as LINE rounds."""
KNOWN, FADED = 20.0, 1024
"""The largest weight of timed rounds, and the number of later rounds after which a weight has
fallen to 1/e."""
COMMON, BRIEF = 0.2, 32
"""COMMON is the share of an unexpected delay that counts as a slower machine. After BRIEF rounds,
such a slowness has fallen to 1/e."""
NOISE, STALL = 0.3, 1.0
"""Standard deviation of the logarithm of a single round's seconds. If a later round takes
more than 1 + STALL times the expected seconds, it counts as 1 + STALL times them."""
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
    name of plain steps is "". The slowness is the present seconds divided by the usual ones.

    Attributes:
        state: Logarithm of the slowness, number of timed rounds, rounds until the next trial, and
            number of trials.
        doublings: 0 for contexts of less than 1,024 tokens, 1 from there, and one more whenever
            the context doubles.
        ratios: Cost ratios of draft lengths 0 .. MOST by `Source.costs`; see `fit`.
        usable: The longest usable draft by `Source.costs`: 0 if drafting is too expensive, and 1
            until two rounds were timed.
        chosen: The proposer and draft length that was chosen last. Trials do not change it."""

    def __init__(self, memory: Memory, rows: int, doublings: int, names: Sequence[str]) -> None:
        """Open the saved table. If there is none, copy the costs of the nearest size after contexts
        that are not longer, with little weight. names: `Source.costs` of all proposers."""
        state = [0.0, 0, EVERY, 0]
        self.state = memory.entries.setdefault(f"{rows} rows, {doublings} doublings", state)
        self.doublings, self._costs = doublings, {}
        self.ratios: dict[str, list[float]] = {}
        self.usable: dict[str, int] = {}
        self.chosen = PLAIN
        for name in ("", *names):
            keys = [
                f"costs of {name}, {1 << n} rows, {more} doublings"
                for n in sorted(range(10), key=lambda n: abs((1 << n) - rows))
                for more in range(doublings, -1, -1)
            ]
            near = next((memory.entries[key] for key in keys if key in memory.entries), None)
            costs = near or [[0.0, 0.0]] * (MOST + 1)
            default = [[cost, min(weight, 1.0)] for cost, weight in costs]
            self._costs[name] = memory.entries.setdefault(keys[0], default)
        self._fitted = self.state[1]
        self.fit()

    @property
    def ready(self) -> bool:
        """Whether enough plain steps were timed to compare drafts with them."""
        return bool(self.entry("", 0)[1] > 1.5)

    @property
    def seconds(self) -> float:
        """Expected seconds of a plain step at the machine's present speed."""
        return math.exp(self.state[0] + self.entry("", 0)[0])

    @property
    def stale(self) -> bool:
        """Whether many rounds were timed since `fit`, which takes about 0.1 ms."""
        rounds = self.state[1]
        return bool(rounds - self._fitted > min(rounds, EXPLORE) / 2)

    def entry(self, name: str, drafted: int) -> list[Any]:
        """Return the entry of a round; `name` is `Source.costs`."""
        return self._costs[name if drafted else ""][drafted]

    def add(self, name: str, drafted: int, seconds: float) -> None:
        """Learn from a round of a proposer, or from a plain step if `drafted` is 0."""
        entry, state = self.entry(name, drafted), self.state
        if not state[1]:
            shift = math.log(seconds) - entry[0]
            for entries in self._costs.values():
                for other in entries:
                    other[0] += shift
        excess = seconds / math.exp(entry[0] + state[0]) - 1
        # If a round is far shorter than the first ones, those have stalled.
        stalled = entry[1] < 3 and excess < -STALL / 2
        gain = 1.0 if stalled else 1 / (1 + entry[1])
        excess = min(excess, STALL) if entry[1] else excess
        entry[0] += math.log1p(gain * excess)
        entry[1] = min(entry[1] + 1, KNOWN)
        state[0] = (1 - 1 / BRIEF) * state[0] + math.log1p(COMMON * (1 - gain) * excess)
        state[1] += 1

    def fit(self) -> None:
        """Let earlier rounds lose some weight, and compute `ratios` and `usable`. A ratio is the
        weighted mean of the length's own timings and of the line that fits all lengths best."""
        plain, rounds = self.entry("", 0)[0], self.state[1] - self._fitted
        self._fitted += rounds
        for name, entries in self._costs.items():
            for entry in entries:
                entry[1] *= (1 - 1 / FADED) ** rounds
            if not name:
                continue
            known = sum(weight for _, weight in entries) > 1.5  # a single round may have stalled
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
            self.usable[name] = 0 if ratios[1] > 1 + TOO_EXPENSIVE else MOST if known else 1


@dataclass
class _Size:
    """The decisions for batches of one size, a power of two.

    Attributes:
        limits: The draft length of each proposer.
        rate: Tokens per plain step's time of the chosen candidate; for plain decoding in a batch,
            what drafts must reach.
        due: Rounds until the next choice.
        trying: Whether the rounds until then are a trial.
        in_flight: Whether the newest round has submitted the pass of the next one.
        idle: Choices since a free proposer drafted in a batch."""

    rows: int
    table: CostTable
    limits: dict[str, int]
    rate: float = 1.0
    due: int = 0
    trying: bool = False
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
        return Prices(size.table.ratios[self._named(name).costs], 1 / size.rate)

    def save(self) -> None:
        self._memory.save()

    def begin(self, context: int, prompt: int, remaining: int) -> None:
        size, self._begun = self.size(1), True
        # The first draft counts as a prefill even if the prompt is short, because the proposer
        # opens its cache before it.
        self._unread = dict.fromkeys(self._unread, max(prompt, UNREAD + 1.0))
        if size.table.stale:
            size.table.fit()
        self._choose(size, context, remaining)
        if prompt > LONG_PROMPT:
            size.limits, size.due = size.limits | dict.fromkeys(self._unread, 0), 1
        self._unread |= {name: 0.0 for name in self._unread if size.limits[name]}

    def on_round(self, report: RoundReport) -> None:
        """Learn from a round, and choose again if that is due."""
        size = self._newest = self.time(report)
        rows, source = report.sequences, self._named(report.source)
        size.due -= 1
        size.table.state[2] -= 1
        size.idle = 0 if report.size and source.free else size.idle
        for acceptance in self._acceptance.values():
            acceptance.fade()
        for row in rows:
            drafter = self._sources.get(row.source, source)
            if row.drafted and not drafter.free:
                # If the proposer stopped early, the token that it left out counts as rejected. A
                # draft token after the end of the sequence also counts as rejected.
                stopped = drafter.stops and not row.ended
                stopped = stopped and row.drafted < size.limits[drafter.name]
                accepted = min(row.accepted, row.emitted - 1)
                self._acceptance[drafter.name].add(row.drafted + stopped, accepted)
        if size.due <= 0:
            size.table.fit()
            context = sum(len(row.committed) for row in rows) // len(rows)
            self._choose(size, context, sum(row.left for row in rows) / len(rows))

    def time(self, report: RoundReport) -> _Size:
        """Learn from the seconds of a round, and return the decisions that it followed."""
        rows, drafted, source = report.sequences, report.size, self._named(report.source)
        size, seconds = self.size(len(rows)), max(report.times.total, 1e-9)
        table, unread = size.table, self._unread.get(source.name, 0.0)
        kind = (source.costs if drafted else "", drafted, size.rows)
        self._memory.rounds[kind] += 1
        # The first plain step after a draft fills the pipeline, and the last one empties it. The
        # first step of a sequence counts: in short sequences, the pass that the end wastes matters.
        began = size.in_flight or (len(rows) == 1 and rows[0].position == 0)
        steady = table.ready if drafted else report.pipelined and began
        size.in_flight = report.pipelined
        # The first round of a kind may have compiled kernels.
        usable = steady and drafted <= MOST and self._memory.rounds[kind] > 1
        if usable and drafted and unread > UNREAD:
            steps = seconds / table.seconds - table.ratios[source.costs][drafted]
            prefill = self._prefill(source)
            prefill[0] = (prefill[0] + max(0.0, steps / unread)) / 2
        elif usable:
            length = max(drafted, size.limits[source.name]) if drafted and source.stops else drafted
            table.add(source.costs, length, seconds)
            if size.trying and size.rows > 1:
                emitted = sum(row.emitted for row in rows) / len(rows)
                lost = min(seconds / table.seconds, 2 * MOST) - emitted / size.rate
                table.state[2] += LOSS * max(0.0, lost)
            if seconds > table.seconds * (1 + TOO_EXPENSIVE * max(1, length)):
                size.due = 0
        added = 0.0
        for row in rows:
            # The proposers of a row that has joined a batch have not prefilled its prompt.
            joined = row.position == 0 and not self._begun
            added += (len(row.committed) if joined else row.accepted + 1) / len(rows)
        for name in self._unread:
            proposed = drafted and name == source.name
            self._unread[name] = 0.0 if proposed else self._unread[name] + added
        return size

    def _named(self, name: str) -> Source:
        """Return the proposer with this name, or the first one if no proposer has the name."""
        return self._sources.get(name) or next(iter(self._sources.values()))

    def size(self, rows: int) -> _Size:
        """Return the decisions for batches of this size."""
        rounded = 1 << (rows - 1).bit_length()
        if rounded not in self._sizes:
            size = _Size(rounded, self._table(rounded, 0), dict.fromkeys(self._sources, 0))
            self._sizes[rounded] = size
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

    def _reading(self, source: Source) -> float:
        """Return the plain steps that the proposer's outstanding prefill takes."""
        unread = self._unread[source.name]
        return unread * self._prefill(source)[0] if unread > UNREAD else 0.0

    def _rates(self, table: CostTable, source: Source) -> list[float]:
        """Return the expected tokens per plain step's time of each usable draft length."""
        chances = self._acceptance[source.name].chances()
        usable = min(source.most, table.usable[source.costs])
        tokens = accumulate(chances[:usable], initial=1.0)
        return [n / cost for n, cost in zip(tokens, table.ratios[source.costs], strict=False)]

    def _choose(
        self, size: _Size, context: int = 0, remaining: float = math.inf, tries: bool = True
    ) -> None:
        """Choose the draft lengths of the next rounds. A trial may be due."""
        if (doublings := max(0, context.bit_length() - 10)) != size.table.doublings:
            size.table = self._table(size.rows, doublings)
        table, size.limits = size.table, dict.fromkeys(self._sources, 0)
        size.rate, size.due = MARGIN ** math.log2(size.rows), EVERY if table.ready else 1
        if not table.ready:
            return
        rates = {source.name: self._rates(table, source) for source in self._paid}
        candidates = {PLAIN: size.rate}
        for source in self._paid:
            reading = self._reading(source)
            for length, rate in enumerate(rates[source.name]):
                if length and reading <= remaining * max(0.0, 1 - 1 / rate):
                    candidates[source.name, length] = rate
        favored = candidates | {table.chosen: candidates.get(table.chosen, 0.0) * MARGIN}
        table.chosen = name, length = max(favored, key=favored.__getitem__)
        size.rate = max(size.rate, candidates[table.chosen])
        size.trying = tries and table.state[2] <= 0
        if size.trying:
            name, length = self._trial(size, rates)
        size.limits |= {name: length} if length else {}
        size.idle += 1
        # The search for every row of a batch takes time even if it finds nothing.
        rests = size.rows > 1 and size.idle % (EXPLORE // EVERY) > 1
        free = (source for source in self._sources.values() if source.free)
        size.limits |= {source.name: 0 if rests else source.most for source in free}

    def _trial(self, size: _Size, rates: dict[str, list[float]]) -> tuple[str, int]:
        """Return what to try next: plain decoding, which all costs are relative to, or the other
        draft length that may be the best one. Return the present choice if none may be better."""
        table, best, hoped = size.table, size.table.chosen, size.rate
        table.state[3] += 1
        table.state[2] = min(EXPLORE, EVERY * table.state[3])
        if best[1] and table.state[3] % 2:
            size.due = TRIED
            return PLAIN
        for source in (s for s in self._paid if self._reading(s) <= EVERY):
            for length, rate in enumerate(rates[source.name][1:], 1):
                weight = table.entry(source.costs, length)[1]
                hope = rate * math.exp(NOISE / math.sqrt(1 + weight))
                if hope > hoped and (source.name, length) != table.chosen:
                    best, hoped, size.due = (source.name, length), hope, TRIED
        return best

    @property
    def reason(self) -> str:
        size = self._newest
        if size is None or not size.table.ready:
            return "the draft length is 0 until plain steps were timed"
        plain = size.table.seconds
        parts = [f"plain decoding: {1000 * plain:.1f} ms per round, {1 / plain:.0f} tokens/s"]
        for source in self._paid:
            chances = self._acceptance[source.name].chances()
            parts.append(f"{source.name or 'draft'}: {size.limits[source.name]} draft tokens")
            for n in (n for n in (1, 2, 3, 4, 6, 8, 11, MOST) if n <= source.most):
                cost, speed = plain * size.table.ratios[source.costs][n], 1 + sum(chances[:n])
                parts.append(
                    f"{n} are accepted with probability {chances[n - 1]:.2f}, "
                    f"{1000 * cost:.1f} ms per round, {speed / cost:.0f} tokens/s"
                )
        return "; ".join(parts)
