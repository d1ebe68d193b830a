"""Many prompts decoded together: who is read when, and which texts share their passes.

Sequences whose lengths are alike form a group: each pass of the target is over one group, whose
caches are a rectangle. A step reads a chunk of one group's prompts and takes a round of every group
that has been read. A group that has been read joins another one of like lengths, if there is one.
Prompts of a list are taken in windows, in the order of their lengths: little of a rectangle is then
padding. Prompts that come one by one are taken in the order in which they came.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..decoding.loop import Decoding
from ..decoding.margins import DAMAGED
from ..decoding.prompt import chunk
from ..decoding.sequence import Sequence as Decoded
from ..decoding.stop_criteria import Emission
from ..decoding.stopwatch import Stopwatch
from ..errors import DecodingError, SpecdecError
from ..interfaces.rounds import RoundReport
from ..options import Options
from ..proposers.drafter import Drafter
from .drafters import keep_costs, make_batch_length
from .jobs import Failures, Job, Part, Request
from .memory import BatchSize, Extent, FixedBatchSize, MemoryBudget, even
from .opening import Opening
from .pair import Pair
from .prompt_cache import PromptCache

WINDOW = 8
"""Prompts that are sorted by length together, in batches."""
JOINS_AT = 0.25
"""Share of the batch that has to be free before others are read: rows are copied when they join."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Group:
    """Sequences that go through the same passes. jobs: those that have not ended."""

    decoding: Decoding
    jobs: list[Job]

    @property
    def extents(self) -> list[Extent]:
        """The lengths of the jobs' sequences."""
        return [job.extent for job in self.jobs]


class ManyRun:
    """Iterate to decode, or `step` until it is `idle`; see `stream_many`.

    An internal failure ends only the requests that it concerns, with an error: one request, or all
    of one pass. It is raised only where ranks are out of step.

    requests: None where they come one by one, through `add`. cache: see Opening. failures: counts
    internal failures. memory_budget: bytes for all sequences together; None takes
    `memory.default_budget`. batched: whether several sequences go through one pass. why_not: the
    reason otherwise.
    """

    def __init__(
        self,
        pair: Pair,
        requests: Iterable[Request] | None,
        options: Options,
        batch_size: BatchSize,
        cache: PromptCache | None = None,
        failures: Failures | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.failures = failures or Failures()
        self._pair = pair
        self._options = options
        self._requests = iter(enumerate(requests or ()))
        # Whoever waits for one answer alone does not wait for others to be read with.
        self._listed = requests is not None
        self._joins_at = JOINS_AT if self._listed else 0.0
        self._opening = Opening(pair, options, cache, self.failures, one_by_one=requests is None)
        self._chosen = self._opening.chosen
        self.why_not = _why_not(pair, self._chosen, batch_size.size)
        self.batched = self.why_not is None
        self._size = batch_size if self.batched else FixedBatchSize(1)
        self._lengths = make_batch_length(pair, self._opening.asked(()), options)
        self.budget = MemoryBudget(
            pair,
            self._opening.asked(()),
            memory_budget,
            cached=0 if cache is None else cache.max_bytes,
            step=options.prefill_step_size,
        )
        self._watch = Stopwatch(
            [self._lengths, self],
            wanted=lambda: self._lengths.wants_parts,
            shared=lambda: len(self._running) + len(self._reading) > 1,
        )
        self._waiting: list[Job] = []
        self._failed: list[Part] = []
        self._reading: list[Group] = []
        self._running: list[Group] = []
        self._shortest_next = False
        self._in_step: Decoding | None = None
        self._jobs: dict[Decoded, Job] = {}
        self._exhausted = requests is None
        self._window_began = 0.0
        self._window_tokens = 0

    @property
    def batch_size(self) -> int:
        """How many sequences may go through one pass now."""
        return self._size.size

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self._exhausted and not (self._jobs or self._failed)

    @property
    def waiting(self) -> int:
        """How many prompts wait to be read."""
        return len(self._waiting)

    @property
    def reserved_bytes(self) -> int:
        """The most bytes of the budget that the admitted requests can need."""
        return self._bytes_with([])

    def __iter__(self) -> Iterator[Part]:
        """The parts still to come, in the order in which they are decoded."""
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self.keep()

    def step(self) -> list[Part]:
        """A chunk of newcomers' prompts, and a round of those that have been read."""
        self._admit()
        if self._reading:
            self._read()
        parts = [part for group in list(self._running) for part in self._step(group)]
        failed, self._failed = self._failed, []
        return [*parts, *failed]

    def keep(self) -> None:
        """Write down what the sequences have taught of drafting, for later runs."""
        keep_costs(self._pair, self._opening.asked(()), self._options, self._lengths)

    def add(self, number: int, request: Request) -> None:
        """Take a request that nobody has had this number for; the next steps read it when there is
        room. What cannot be read is a part with an error."""
        try:
            job = Job.of(self._pair, number, request, self._chosen)
            self.budget.check(len(job.ids), job.sequence.remaining)
        except Exception as problem:
            # What is wrong with the request itself is a SpecdecError.
            own = isinstance(problem, SpecdecError)
            told = str(problem) if own else self._noted(problem)
            self._failed.append(Part(number, Emission((), ()), error=told))
            return
        self._jobs[job.sequence] = job
        self._waiting.append(job)

    def cancel(self, number: int) -> None:
        """Give up a prompt, wherever it is on its way: no part of it comes any more, and the next
        step goes without it."""
        job = next((each for each in self._jobs.values() if each.number == number), None)
        if job is not None:
            self._leave(job)

    def on_round(self, report: RoundReport) -> None:
        """As decoding.rounds.RoundListener says: every sequence has figures of its own."""
        assert self._in_step is not None
        for sequence, each in zip(self._in_step.sequences, report.sequences, strict=True):
            job = self._jobs.get(sequence)
            if job is None:
                continue
            try:
                _record(job, replace(report, sequences=(each,), ended=each.ended))
            except Exception as problem:
                sequence.fail(problem)

    @contextmanager
    def _ends(self, jobs: Sequence[Job], *, a_pass: bool = False) -> Iterator[None]:
        """End these jobs, and no others, with an error if the block raises."""
        try:
            yield
        except Exception as problem:
            if getattr(self._pair.target, "lost", False):
                raise
            self.failures.passes += a_pass
            told = self._noted(problem)
            for job in jobs:
                job.sequence.fail()
                self._leave(job)
                self._failed.append(Part(job.number, Emission((), ()), error=told))

    def _noted(self, problem: Exception) -> str:
        log.error("%s", problem, exc_info=problem)
        return self.failures.note(problem)

    def _admit(self) -> None:
        """Start to read the waiting requests that fit, first come, first served: no request is
        admitted before an earlier one that does not fit yet."""
        if not (self._waiting or self._exhausted):
            self._fill_window()
        room = self.batch_size - self._begun
        if self._begun and room < max(1, self._joins_at * self.batch_size):
            return
        while jobs := self._next_jobs():
            self._waiting = [each for each in self._waiting if each not in jobs]
            with self._ends(jobs, a_pass=True):
                decoding = self._opening.open(jobs, self._lengths, self._watch, self.batched)
                self._reading.append(Group(decoding, jobs))

    @property
    def _begun(self) -> int:
        return len(self._jobs) - len(self._waiting)

    def _next_jobs(self) -> list[Job]:
        """Return the jobs to read together next: the first that waits, and others like it."""
        room = self.batch_size - self._begun
        read = [job for group in self._reading for job in group.jobs]
        jobs: list[Job] = []
        passed = 0
        for job in self._waiting:
            if len(jobs) >= room:
                break
            if jobs and not (job.alike == jobs[0].alike and self._read_together([*jobs, job])):
                passed += self.budget.of_caches([job.extent])
                continue
            if self._opening.waits(job, [*read, *jobs]):
                continue
            if self._bytes_with([*jobs, job]) + passed > self.budget.nbytes:
                break
            jobs.append(job)
        return jobs

    def _bytes_with(self, jobs: Sequence[Job]) -> int:
        """Return the bytes to reserve if these jobs are admitted: for the caches of all groups, and
        for reading a chunk of one group."""
        reading = [group.extents for group in self._reading]
        reading += [[job.extent for job in jobs]] if jobs else []
        caches = map(self.budget.of_caches, [*reading, *(each.extents for each in self._running)])
        return sum(caches) + max(map(self.budget.of_reading, reading), default=0)

    def _read_together(self, jobs: Sequence[Job]) -> bool:
        """Return whether padding these prompts to one length costs little and, where prompts come
        one by one, all of them fit into one chunk."""
        lengths, most = [len(job.ids) for job in jobs], self._options.prefill_step_size or chunk(1)
        return even(lengths, most) and (self._listed or len(lengths) * max(lengths) <= most)

    def _fill_window(self) -> None:
        ahead = min(WINDOW * self.batch_size, sys.maxsize)
        window = list(itertools.islice(self._requests, ahead))
        if not window:
            self._exhausted = True
            return
        now = self._watch.clock()
        if self._window_tokens:
            self._size.took(self._window_tokens, now - self._window_began)
        self._window_began, self._window_tokens = now, 0
        for number, request in window:
            self.add(number, request)
        self._waiting.sort(key=lambda job: (repr(job.alike), len(job.ids)))

    def _read(self) -> None:
        """Read a chunk of one group's prompts: alternately of the group that came first and of the
        one with the fewest tokens left, so that neither long nor short prompts starve."""
        self._shortest_next = not self._shortest_next
        group = self._reading[0]
        if self._shortest_next:
            group = min(self._reading, key=lambda each: each.decoding.left)
        decoding = group.decoding
        if decoding.reading:
            with self._ends(group.jobs, a_pass=True):
                decoding.step()
        if not group.jobs or decoding.reading:
            return
        for job in group.jobs:
            with self._ends([job]):
                job.read = self._watch.clock()
                self._opening.keep(job, decoding)
        if not group.jobs:
            return
        self._reading.remove(group)
        other = next((each for each in self._running if self._belong_together(each, group)), None)
        if other is None:
            self._running.append(group)
        else:
            other.decoding.join(decoding)
            other.jobs += group.jobs

    def _belong_together(self, one: Group, newcomers: Group) -> bool:
        both, budget = [*one.extents, *newcomers.extents], self.budget
        if one.jobs[0].rule != newcomers.jobs[0].rule or not budget.even(both):
            return False
        more = budget.of_caches(both) - budget.of_caches(one.extents)
        return self.reserved_bytes + more <= budget.nbytes

    def _step(self, group: Group) -> list[Part]:
        decoding = self._in_step = group.decoding
        emissions: tuple[Emission, ...] = ()
        with self._ends(group.jobs, a_pass=True):
            emissions = decoding.step()
        self._in_step = None
        parts: list[Part] = []
        for sequence, emission in zip(decoding.sequences, emissions, strict=bool(emissions)):
            # One that has ended stays until no pass is in flight.
            if (job := self._jobs.get(sequence)) is not None:
                with self._ends([job]):
                    parts.append(self._part(decoding, job, emission))
        return parts

    def _part(self, decoding: Decoding, job: Job, emission: Emission) -> Part:
        self._window_tokens += len(emission.tokens)
        if (problem := job.sequence.problem) is not None:
            self._leave(job)
            return Part(job.number, Emission((), ()), error=self.failures.note(problem))
        part = job.part(emission, self._chosen, self._watch.clock)
        if part.result is not None:
            with self._ends([]):  # the text is there
                self._opening.keep(job, decoding)
        if part.error == DAMAGED:
            self._opening.forget()
        if part.last:
            self._leave(job)
        return part

    def _leave(self, job: Job) -> None:
        """Remove a job that has ended, and the groups that have no jobs left."""
        del self._jobs[job.sequence]
        job.behind = None  # otherwise each job would hold all earlier ones in memory
        job.sequence.fail()
        self._waiting = [each for each in self._waiting if each is not job]
        for groups in (self._reading, self._running):
            for group in groups:
                group.jobs = [each for each in group.jobs if each is not job]
            groups[:] = [group for group in groups if group.jobs]


def _record(job: Job, report: RoundReport) -> None:
    try:
        job.recorder.on_round(report)
        job.trials.on_round(report)
    except DecodingError:
        job.sequence.finish("damaged")


def _why_not(pair: Pair, chosen: Sequence[Drafter], batch_size: int) -> str | None:
    if batch_size == 1:
        return "the batch size is 1"
    if not pair.target.batches:
        return f"{pair.name} cannot take several sequences in one pass"
    if any(each.name == "draft" for each in chosen) and pair.draft and not pair.draft.batches:
        return f"{pair.draft_name} cannot take several sequences in one pass"
    return None
