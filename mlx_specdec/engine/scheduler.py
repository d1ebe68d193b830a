"""The scheduler, which decides when to prefill a request and which requests share passes.

A step prefills a chunk of one group's prompts, and takes a round of every prefilled group."""

import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

from ..core.loop import Group, chunk_size
from ..core.options import Options
from ..core.row import Request, Row
from ..core.statistics import Stopwatch
from ..errors import DAMAGED, SpecdecError, message
from ..results import Step
from ..types import Progress, Proposer
from .drafters import drafting
from .memory import BatchSize, Extent, MemoryBudget, even
from .opening import Opener
from .pair import Pair
from .prompt_cache import PromptCache
from .request import extent, reported
from .turns import Turns

BROKEN = "this text could not go on, since something failed inside"
SORTED_BATCHES = 8
"""Number of batches of prompts that are sorted by length together."""
JOINS_AT = 0.125
"""Share of the batch that has to be free before waiting requests are prefilled. It limits how often
the caches are copied, which happens when sequences join a group. A quarter is 2 to 4 % slower."""

log = logging.getLogger(__name__)


@dataclass
class Failures:
    """A count of the internal failures that ended requests.

    Attributes:
        count: The number of failures.
        last: The class name of the most recent exception.
        passes: The number of shared passes that have failed since the last generated token.
    """

    count: int = 0
    last: str | None = None
    passes: int = 0

    def note(self, problem: Exception) -> str:
        """Count a failure, and return the error message for the requests that it ends. Messages of
        other libraries only go into the log, since they may contain paths."""
        self.count += 1
        self.last = type(problem).__name__
        return message(problem) or f"{BROKEN} ({self.last})"


@dataclass(eq=False)
class Scheduler:
    """A scheduler that decodes the requests of one pair together. Iterate over it for the steps of
    all requests, or call `step` until it is `idle`. `stream_many` creates it.

    An internal failure ends one request, or all requests of one pass, with an error. It is raised
    only if the ranks of a cluster are no longer in step, or if `raises` is true.

    Attributes:
        pair: The models.
        requests: The requests; None if they come one by one through `add`.
        options: The settings that decide on proposer and draft length of all requests that come one
            by one. The `num_draft` and `regular` of such a request only limit its draft length.
        size: The maximum number of sequences in a pass.
        cache: The prefix cache.
        memory_budget: The bytes for all sequences; None takes `memory.default_budget`.
        proposer: The caller's own proposer, or None.
        progress: Receives the number of prefilled prompt tokens.
        timed: Whether some rounds are timed in parts.
        raises: Whether internal failures are raised.
        turns: Decides when chunks of prompts are prefilled. None prefills one in each step, which
            fills batches soonest.
        why_not: Why only one sequence goes through a pass, or "".
        held: Bytes of the budget that work outside of the scheduler needs.
    """

    pair: Pair
    requests: Iterable[Request] | None
    options: Options
    size: BatchSize
    cache: PromptCache | None = None
    failures: Failures = field(default_factory=Failures)
    memory_budget: int | None = None
    _: KW_ONLY
    proposer: Proposer | None = None
    progress: Progress | None = None
    timed: bool = False
    raises: bool = False
    turns: Turns | None = None
    held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._requests = iter(enumerate(self.requests or ()))
        # Requests that come one by one do not wait for more requests to share a prefill.
        self._listed = self.requests is not None
        self._joins_at = JOINS_AT if self._listed else 0.0
        shared = self.proposer, self.progress, self.cache, self._note, self.size.size
        self.opener = Opener(self.pair, self.options, *shared, one_by_one=not self._listed)
        key = drafting(self.options), self.pair.target, self.pair.draft
        self._openers = {key: self.opener}
        self.why_not = self.opener.why_not
        if not (self.opener.batched or (self.options.exact and not self._listed)):
            self.size = BatchSize(1)
        self._watch = Stopwatch(timed=self.timed)
        # The requests that wait for a row of a batch, and the groups whose prompts are prefilled.
        self.waiting: list[Row] = []
        self.prefilling: list[Group] = []
        self._failed: list[Step] = []
        self._running: list[Group] = []
        self._shortest_next = False
        # The rows that have not ended, with the openers of their models.
        self._rows: dict[Row, Opener] = {}
        self._exhausted = self.requests is None
        self._window_began, self._window_tokens = 0.0, 0

    @cached_property
    def budget(self) -> MemoryBudget:
        cached = 0 if self.cache is None else self.cache.max_bytes
        return MemoryBudget(self.pair, self.memory_budget, cached, self.options.prefill_step_size)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self._exhausted and not (self._rows or self._failed)

    @property
    def rows_in_prefill(self) -> list[Row]:
        """The requests whose prompts are being prefilled."""
        return [row for group in self.prefilling for row in self._live(group)]

    @property
    def reserved_bytes(self) -> int:
        """The maximum number of bytes that the admitted requests can need."""
        return self._bytes_with([])

    def __iter__(self) -> Iterator[Step]:
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self.keep()
            self.save_costs()

    def step(self) -> list[Step]:
        """Prefill a chunk if it is time, decode a round of every prefilled request, and return
        their steps."""
        self.prefill()
        steps = self.decode()
        if self.turns is not None:
            self.turns.decodes(self, bool(self._running))
        return steps

    def prefill(self) -> None:
        """Admit waiting requests, and prefill a chunk of one group's prompts if it is time. The
        oldest group and the one with the fewest tokens left take turns, so that neither long nor
        short prompts starve."""
        self._admit()
        turns, wait = self.turns, not self._running
        if self.prefilling and (turns is None or turns.may_prefill(wait=wait)):
            self._shortest_next = not self._shortest_next
            group = self.prefilling[0]
            if self._shortest_next:
                group = min(self.prefilling, key=lambda group: group.to_prefill)
            if turns is None:
                self._prefill(group)
                return
            group.shorter = turns.most_tokens(group.pace)
            began, tokens = self._watch.clock(), group.to_prefill
            self._prefill(group)
            seconds = self._watch.clock() - began
            turns.prefilled(seconds)
            if not group.rows[0].options.exact:  # whose passes depend on where chunks end
                group.pace = (tokens - group.to_prefill) / max(seconds, 1e-9)

    def decode(self) -> list[Step]:
        """Take a round of every prefilled group."""
        steps = [step for group in list(self._running) for step in self._round(group)]
        failed, self._failed = self._failed, []
        return steps + failed

    def keep(self) -> None:
        """Add what is computed of the requests that have not ended to the prefix cache."""
        for row in self._rows:
            self._keep(row)

    def save_costs(self) -> None:
        """Save the costs and acceptance rates of the rounds so far."""
        for opener in self._openers.values():
            opener.worth.memory.save()

    def add(self, number: int, request: Request) -> None:
        """Add a request under a new number. It is prefilled when there is room. An unusable request
        returns a step with an error when the next step is taken."""
        try:
            row, opener = self._opened(number, request)
            if request.pair is None:
                self.budget.check(len(row.prompt), row.remaining)
        except SpecdecError as problem:  # the request itself is unusable
            self._failed.append(Step(number, finish_reason="failed", error=str(problem)))
        except Exception as problem:
            self._failed.append(Step(number, finish_reason="failed", error=self._note(problem)))
        else:
            self._rows[row] = opener
            self.waiting.append(row)

    def start(self, request: Request) -> None:
        """Start a single request, with number 0, at once and without reserving memory.

        Raises:
            PromptError: The prompt is unusable.
            OptionError: The options do not suit the model.
        """
        row, self._rows[row] = self._opened(0, request)
        self.prefilling.append(self._rows[row].open([row], self._watch))

    def _opened(self, number: int, request: Request) -> tuple[Row, Opener]:
        """Return the row of a new request, and the opener of its models. Raises PromptError and
        OptionError."""
        row, pair = self._opener_of(request.options, self.pair).row(number, request)
        return row, self._opener_of(row.options, pair)

    def _opener_of(self, options: Options, pair: Pair) -> Opener:
        """Return the opener of requests with these options and models. Raises OptionError."""
        shared = options if self._listed else self.options
        if shared.exact != options.exact:
            shared = replace(shared, exact=options.exact, num_draft=options.num_draft)
        key = drafting(shared), pair.target, pair.draft
        if key not in self._openers:
            self._openers[key] = replace(self.opener, options=shared, pair=pair)
        return self._openers[key]

    def cancel(self, number: int) -> None:
        """End a request without a last step. Its state stays in the prefix cache, so that the same
        request continues there."""
        if (row := self._find(number)) is not None:
            self._keep(row)
            self._leave(row)

    def interrupt(self, number: int) -> Step | None:
        """End a request, and return its last step, or None if it has already ended."""
        row = self._find(number)
        return None if row is None else self._reported(row, row.finish("interrupted"))

    def _find(self, number: int) -> Row | None:
        return next((row for row in self._rows if row.number == number), None)

    def _live(self, group: Group) -> list[Row]:
        """Return the rows of a group that have not ended."""
        return [row for row in group.members if row in self._rows]

    @contextmanager
    def _failing(self, rows: Sequence[Row], *, a_pass: bool = False) -> Iterator[None]:
        """End these rows with an error if the block fails. `a_pass` is true if it is a shared
        pass."""
        try:
            yield
        except Exception as problem:
            error = self._note(problem)
            self.failures.passes += a_pass
            for row in rows:
                row.fail()
                self._leave(row)
                self._failed.append(Step(row.number, finish_reason="failed", error=error))

    def _note(self, problem: Exception) -> str:
        """Log and count an internal failure, and return its error message. Raises the failure if
        `raises` is true, or if the ranks of a cluster are no longer in step."""
        if self.raises or self.pair.target.lost:
            raise problem
        log.error("%s", problem, exc_info=problem)
        return self.failures.note(problem)

    def _admit(self) -> None:
        """Admit the waiting requests that fit into memory, first come, first served. No request
        overtakes an earlier one that does not fit yet."""
        if not (self.waiting or self._exhausted):
            self._fill_window()
        if not self.waiting:
            return
        begun = len(self._rows) - len(self.waiting)
        room = self.size.size - begun
        if begun and room < max(1, self._joins_at * self.size.size):
            return
        while rows := self._next_rows():
            self.waiting = [row for row in self.waiting if row not in rows]
            with self._failing(rows, a_pass=True):
                self.prefilling.append(self._rows[rows[0]].open(rows, self._watch))

    def _next_rows(self) -> list[Row]:
        """Return the rows whose prompts are prefilled together next: the first waiting row, and the
        waiting rows that can share its passes and that fit into memory with it."""
        room = self.size.size - len(self._rows) + len(self.waiting)
        before, rows = self.rows_in_prefill, list[Row]()
        passed = 0
        for row in self.waiting:
            if len(rows) >= room:
                break
            if rows and not (row.alike == rows[0].alike and self._prefill_together([*rows, row])):
                passed += self.budget.of_caches([extent(row)])
                continue
            if self._rows[row].waits(row, [*before, *rows]):
                continue
            if self._bytes_with([*rows, row]) + passed > self.budget.nbytes:
                break
            rows.append(row)
        return rows

    def _extents(self, group: Group) -> list[Extent]:
        return [extent(row) for row in self._live(group)]

    def _bytes_with(self, rows: Sequence[Row]) -> int:
        """Return the bytes to reserve if these rows are admitted, for the caches of all groups and
        for the activations of the largest chunk of a prefill."""
        prefills = [self._extents(group) for group in self.prefilling]
        prefills += [list(map(extent, rows))] if rows else []
        caches = map(self.budget.of_caches, [*prefills, *map(self._extents, self._running)])
        return self.held + sum(caches) + max(map(self.budget.of_prefill, prefills), default=0)

    def _prefill_together(self, rows: Sequence[Row]) -> bool:
        """Return whether padding these prompts to one length costs little. If requests come one by
        one, the prompts must also fit into one chunk."""
        lengths, holds_scores = [len(row.prompt) for row in rows], self.pair.target.holds_scores
        most = self.options.prefill_step_size or chunk_size(1, holds_scores=holds_scores)
        return even(lengths, most) and (self._listed or len(lengths) * max(lengths) <= most)

    def _fill_window(self) -> None:
        """Take the next requests from the iterator, and sort them by length."""
        ahead = min(SORTED_BATCHES * self.size.size, sys.maxsize)
        window = list(itertools.islice(self._requests, ahead))
        if not window:
            self._exhausted = True
            return
        now = self._watch.clock()
        if self._window_tokens:
            self.size.took(self._window_tokens, now - self._window_began)
        self._window_began, self._window_tokens = now, 0
        for number, request in window:
            self.add(number, request)
        self.waiting.sort(key=lambda row: (repr(row.alike), len(row.prompt)))

    def _prefill(self, group: Group) -> None:
        """Prefill a chunk of a group's prompts. A group without tokens left starts to decode."""
        if group.prefilling:
            with self._failing(self._live(group), a_pass=True):
                group.step()
        for row in self._live(group):
            row.prefilled = self._watch.clock()
            with self._failing([row]):
                if group.to_cache:
                    self._rows[row].keep(row, group)
        if group.prefilling or not self._live(group):
            return
        self.prefilling.remove(group)
        hosts = (host for host in self._running if self._belong_together(host, group))
        host = next(hosts, None)
        if host is None:
            self._running.append(group)
        else:
            host.join(group)

    def _belong_together(self, host: Group, newcomers: Group) -> bool:
        own, more = self._extents(host), self._extents(newcomers)
        both, budget = [*own, *more], self.budget
        if host.rows[0].key != newcomers.rows[0].key or not budget.even(both):
            return False
        added = budget.of_caches(both) - budget.of_caches(own)
        return self.reserved_bytes + added <= budget.nbytes

    def _round(self, group: Group) -> list[Step]:
        steps: list[Step] = []
        with self._failing(self._live(group), a_pass=True):
            taken = group.step()  # which removes and adds rows
            for row, step in zip(group.rows, taken, strict=True):
                # A row that has ended stays in the group until no pass is in flight.
                if row in self._rows:
                    with self._failing([row]):
                        steps.append(self._reported(row, step))
        return steps

    def _reported(self, row: Row, step: Step) -> Step:
        self._window_tokens += len(step.tokens)
        if row.problem is not None:
            self._leave(row)
            error = self.failures.note(row.problem)
            return Step(row.number, finish_reason="failed", error=error)
        opener = self._rows[row]
        step = reported(opener.pair, row, step, self._watch.clock())
        if not step.last:
            return step
        if step.result is not None:
            self._keep(row)
            opener.finish(row)
        elif step.error == DAMAGED and opener.cache is not None:
            opener.cache.clear()  # it may hold NaN or infinity of this row
        self._leave(row)
        return step

    def _keep(self, row: Row) -> None:
        """Add a row to the prefix cache. A failure does not affect the request."""
        for group in [*self._running, *self.prefilling]:
            if row in group.members:
                try:
                    self._rows[row].keep(row, group)
                except Exception as problem:
                    self._note(problem)

    def _leave(self, row: Row) -> None:
        """Remove a row that has ended, and then the groups without rows."""
        del self._rows[row]
        row.behind = None  # otherwise, every row would keep all earlier rows in memory
        row.fail()
        self.waiting = [waiting for waiting in self.waiting if waiting is not row]
        for groups in (self.prefilling, self._running):
            for group in [group for group in groups if not self._live(group)]:
                groups.remove(group)
                # The watch and the states of proposers would keep the group's caches in memory.
                self._watch.interrupt()
                for member in group.members:
                    member.state.clear()
