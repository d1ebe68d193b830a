"""Many prompts decoded together: who is read when, and who joins.

A group of prompts is read beside the running batch, a chunk a step, and joins it as a whole.
Prompts of a list are taken in windows, in the order of their lengths: little of a rectangle is then
padding. Prompts that come one by one are taken in the order in which they came.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from ..assemble import Pair
from ..checkpoints.disk.sizes import memory
from ..decoding.batch_size import BatchSize, FixedBatchSize
from ..decoding.loop import Decoding
from ..decoding.rounds import RoundReport
from ..decoding.sequence import Sequence as Decoded
from ..decoding.stop_criteria import Emission
from ..decoding.stopwatch import Stopwatch
from ..drafters import keep_costs, make_batch_length
from ..drafting.drafter import Drafter
from ..errors import DecodingError, SpecdecError
from ..options import Options
from ..prompt_cache.cache import PromptCache
from .jobs import Job, Part, Request
from .opening import Opening

WINDOW = 8
"""Prompts that are sorted by length together, in batches."""
JOINS_AT = 0.25
"""Share of the batch that has to be free before others are read: rows are copied when they join."""


class ManyRun:
    """Iterate to decode, or `step` until it is `idle`; see `stream_many`.

    requests: None where they come one by one, through `add`. cache: see Opening. batched:
    whether several sequences go through one pass. why_not: the reason otherwise.
    """

    def __init__(
        self,
        pair: Pair,
        requests: Iterable[Request] | None,
        options: Options,
        batch_size: BatchSize,
        cache: PromptCache | None = None,
    ) -> None:
        self._pair = pair
        self._options = options
        self._requests = iter(enumerate(requests or ()))
        # Whoever waits for one answer alone does not wait for others to be read with.
        self._joins_at = 0.0 if requests is None else JOINS_AT
        self._opening = Opening(pair, options, cache, one_by_one=requests is None)
        self._chosen = self._opening.chosen
        self.why_not = _why_not(pair, self._chosen, batch_size.size)
        self.batched = self.why_not is None
        self._size = batch_size if self.batched else FixedBatchSize(1)
        self._lengths = make_batch_length(pair, self._opening.asked(()), options)
        self._watch = Stopwatch([self._lengths, self], wanted=lambda: self._lengths.wants_parts)
        self._waiting: list[Job] = []
        self._failed: list[Part] = []
        self._reading: Decoding | None = None
        self._running: Decoding | None = None
        self._rule_key: object = None
        self._jobs: dict[Decoded, Job] = {}
        self._begun = 0
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
        at_work = self._running is not None or self._reading is not None
        return self._exhausted and not (at_work or self._waiting or self._failed)

    @property
    def waiting(self) -> int:
        """How many prompts wait to be read."""
        return len(self._waiting)

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
        parts, self._failed = self._failed, []
        if self._reading is not None:
            self._read()
        if self._running is not None:
            parts += self._step(self._running)
        return parts

    def keep(self) -> None:
        """Write down what the sequences have taught of drafting, for later runs."""
        keep_costs(self._pair, self._opening.asked(()), self._options, self._lengths)

    def add(self, number: int, request: Request) -> None:
        """Take a request that nobody has had this number for; the next steps read it when there is
        room. What cannot be read is a part with an error."""
        try:
            job = Job.of(self._pair, number, request, self._chosen)
        except SpecdecError as problem:
            self._failed.append(Part(number, Emission((), ()), error=str(problem)))
            return
        self._jobs[job.sequence] = job
        self._waiting.append(job)

    def cancel(self, number: int) -> None:
        """Give up a prompt, wherever it is on its way: no part of it comes any more, and the next
        step goes without it."""
        job = next((each for each in self._jobs.values() if each.number == number), None)
        if job is None:
            return
        del self._jobs[job.sequence]
        if job in self._waiting:
            self._waiting.remove(job)
            return
        self._begun -= 1
        job.sequence.finish("interrupted")
        if self._reading is not None and _over(self._reading):
            self._reading = None
        if self._running is not None and _over(self._running):
            self._running = None

    def on_round(self, report: RoundReport) -> None:
        """As decoding.rounds.RoundListener says: every sequence has figures of its own."""
        running = self._running
        assert running is not None
        for sequence, each in zip(running.sequences, report.sequences, strict=True):
            job = self._jobs.get(sequence)
            if job is None:
                continue
            try:
                own = replace(report, sequences=(each,), ended=each.ended)
                job.recorder.on_round(own)
                job.trials.on_round(own)
            except DecodingError:
                sequence.finish("damaged")

    def _admit(self) -> None:
        """Begin to read a group, where there is room for one."""
        if self._reading is not None:
            return
        if not (self._waiting or self._exhausted):
            self._fill_window()
        if not self._waiting:
            return
        room = self.batch_size - self._begun
        key = self._waiting[0].rule
        if self._begun and (
            room < max(1, self._joins_at * self.batch_size) or key != self._rule_key
        ):
            return
        alike = self._waiting[0].alike
        group = [each for each in self._waiting if each.alike == alike][:room]
        group = self._opening.together(group)
        self._waiting = [each for each in self._waiting if each not in group]
        self._begun += len(group)
        self._reading = self._opening.open(group, self._lengths, self._watch, self.batched)
        self._rule_key = key

    def _fill_window(self) -> None:
        ahead = min(WINDOW * self.batch_size, sys.maxsize)
        window = list(itertools.islice(self._requests, ahead))
        if not window:
            self._exhausted = True
            return
        now = self._watch.clock()
        if self._window_tokens:
            fits = 2 * mx.get_peak_memory() < memory()
            self._size.took(self._window_tokens, now - self._window_began, may_grow=fits)
        self._window_began, self._window_tokens = now, 0
        for number, request in window:
            self.add(number, request)
        self._waiting.sort(key=lambda job: (repr(job.alike), len(job.ids)))

    def _read(self) -> None:
        """A chunk of the newcomers' prompts; they join when all is read."""
        reading = self._reading
        assert reading is not None
        if reading.reading:
            reading.step()
        if reading.reading:
            return
        for sequence in reading.sequences:
            if sequence in self._jobs:
                self._jobs[sequence].read = self._watch.clock()
                self._opening.keep(self._jobs[sequence], reading)
        if self._running is None:
            self._running = reading
        else:
            self._running.join(reading)
        self._reading = None

    def _step(self, running: Decoding) -> list[Part]:
        emissions = running.step()
        parts = [
            self._part(running, sequence, emission)
            for sequence, emission in zip(running.sequences, emissions, strict=True)
            if sequence in self._jobs
        ]
        if _over(running):
            self._running = None
        return parts

    def _part(self, running: Decoding, sequence: Decoded, emission: Emission) -> Part:
        job = self._jobs[sequence]
        self._window_tokens += len(emission.tokens)
        part = job.part(emission, self._chosen, self._watch.clock)
        if part.result is not None:
            self._opening.keep(job, running)
        if part.last:
            del self._jobs[sequence]
            self._begun -= 1
        return part


def _why_not(pair: Pair, chosen: Sequence[Drafter], batch_size: int) -> str | None:
    if batch_size == 1:
        return "the batch size is 1"
    if not pair.target.batches:
        return f"{pair.name} cannot take several sequences in one pass"
    if any(each.name == "draft" for each in chosen) and pair.draft and not pair.draft.batches:
        return f"{pair.draft_name} cannot take several sequences in one pass"
    return None


def _over(decoding: Decoding) -> bool:
    """Whether nothing is left to decode."""
    return not decoding.joins and all(each.ended for each in decoding.sequences)
