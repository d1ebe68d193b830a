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
from typing import Literal

import mlx.core as mx

from .assemble import Pair, make_rule
from .checkpoints.disk.sizes import memory
from .contracts import Proposer
from .decoding.batch_size import AutoBatchSize, BatchSize, FixedBatchSize
from .decoding.loop import Decoding
from .decoding.prompt import PromptReader
from .decoding.rounds import RoundReport
from .decoding.run import Result
from .decoding.sequence import Batch
from .decoding.sequence import Sequence as Decoded
from .decoding.stop_criteria import Emission
from .decoding.stopwatch import Stopwatch
from .drafters import drafters, keep_costs, make_batch_length, make_proposer
from .drafting import forced, prediction
from .drafting.drafter import Drafter
from .drafting.limited import Limited
from .errors import DecodingError, OptionError, PromptError, SpecdecError
from .jobs import Job, Prompt, most_drafted
from .jobs import Part as Part
from .jobs import Request as Request
from .kept import NOTHING, Beginning
from .options import Options
from .prepare import checked_options, encode, for_model
from .prompt_cache.cache import PromptCache
from .sampling.settings import integer

WINDOW = 8
"""Prompts that are sorted by length together, in batches."""
JOINS_AT = 0.25
"""Share of the batch that has to be free before others are read: rows are copied when they join."""


class ManyRun:
    """Iterate to decode, or `step` until it is `idle`; see `stream_many`.

    requests: None where they come one by one, through `add`. cache: what was computed of earlier
    prompts is not computed again. batched: whether several sequences go through one pass. why_not:
    the reason otherwise.
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
        self._cache = cache
        self._options = options
        self._requests = iter(enumerate(requests or ()))
        # Whoever waits for one answer alone does not wait for others to be read with.
        self._joins_at = 0.0 if requests is None else JOINS_AT
        bound, _ = for_model(pair, options)
        self._chosen: Sequence[Drafter] = drafters(bound, options)
        self._forced = forced.drafter(bound)
        self._predicts = requests is None and bool(self._chosen)
        self.why_not = _why_not(pair, self._chosen, batch_size.size)
        self.batched = self.why_not is None
        self._size = batch_size if self.batched else FixedBatchSize(1)
        self._lengths = make_batch_length(pair, self._asked(()), options)
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
        keep_costs(self._pair, self._asked(()), self._options, self._lengths)

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
        if self._cache is not None:
            together = set(self._cache.apart([job.ids for job in group]))
            later = [job for place, job in enumerate(group) if place not in together]
            group = [job for job in group if job not in later or job.postponed]
            for job in later:
                job.postponed = True
        self._waiting = [each for each in self._waiting if each not in group]
        self._reading = self._open(group)
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

    def _open(self, group: Sequence[Job]) -> Decoding:
        options = group[0].options
        prompts = [job.ids for job in group]
        model = self._pair.target
        chosen = self._asked(group[0].prediction)
        proposer = make_proposer(chosen, options, self._lengths, batch=self.batched)
        if proposer is not None:
            proposer = Limited(proposer, [most_drafted(job.options) for job in group])
        known = [self._beginning(job, proposer) for job in group]
        kept = [each.target for each in known]
        context = (
            model.open_batch(prompts, kept) if self.batched else model.open(prompts[0], kept[0])
        )
        sequences = [job.sequence for job in group]
        self._begun += len(group)
        for job in group:
            job.began = self._watch.clock()
        return Decoding(
            target=context,
            proposer=proposer,
            rule=make_rule(options),
            batch=Batch(sequences),
            draft_length=self._lengths,
            reader=PromptReader(
                context,
                [each.committed for each in sequences],
                prompts,
                proposer,
                step_size=options.prefill_step_size,
                kept=[each.proposer for each in known],
            ),
            watch=self._watch,
        )

    def _beginning(self, job: Job, proposer: Proposer | None) -> Beginning:
        if self._cache is None:
            return NOTHING
        known = self._cache.beginning(self._pair.target, job.ids, proposer)
        job.cached_tokens = known.cached_tokens
        return known

    def _keep(self, job: Job, decoding: Decoding) -> None:
        """For later prompts that begin alike."""
        if self._cache is not None:
            row = decoding.sequences.index(job.sequence)
            self._cache.keep(job.ids, job.sequence.committed, decoding.memories(row))

    def _asked(self, expected: Sequence[int]) -> Sequence[Drafter]:
        """Who drafts for sequences that may turn out to be as expected, and may be bound."""
        if not self._predicts:
            return self._chosen
        return (self._forced, prediction.drafter(expected), *self._chosen)

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
                self._keep(self._jobs[sequence], reading)
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
            self._keep(job, running)
        if part.last:
            del self._jobs[sequence]
            self._begun -= 1
        return part


def stream_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
) -> ManyRun:
    """Decode many prompts, up to `batch_size` of them in one pass of the target; "auto" takes what
    brings most tokens a second.

    prompts: may be an endless iterator; a Request has options of its own, of which proposer and
    rule must be those of `options`; its draft length limits that of `options`, which is one number
    for all. A completion is what its prompt becomes alone.
    Where the model cannot take several sequences, they are decoded one after the other.
    Raises OptionError, CheckpointError for a chat template that refuses settings for it, and
    PromptError for anything but a list or an iterator of prompts.
    """
    options = checked_options(options)
    for_model(pair, options)
    if options.system_prompt is not None or options.chat_template_config:
        encode(pair, "a", options)  # templates refuse such settings whatever the prompt
    if batch_size != "auto" and integer("batch-size", batch_size) < 1:
        raise OptionError(f"batch-size must be 1 or more, not {batch_size}")
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise PromptError("prompts must be a list: put the text into one")
    if options.simulated_acceptance is not None:
        raise OptionError("simulate-acceptance measures one text: leave it out for many")
    mx.reset_peak_memory()
    requests = (
        prompt if isinstance(prompt, Request) else Request(prompt, options) for prompt in prompts
    )
    size = AutoBatchSize() if batch_size == "auto" else FixedBatchSize(batch_size)
    return ManyRun(pair, requests, options, size)


def generate_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
) -> list[Result]:
    """All completions in the order of their prompts; see `stream_many`.

    Raises DecodingError with the number of the first prompt that has none.
    """
    results: dict[int, Result] = {}
    for part in stream_many(pair, prompts, options, batch_size=batch_size):
        if part.error is not None:
            raise DecodingError(f"prompt {part.number}: {part.error}")
        if part.result is not None:
            results[part.number] = part.result
    return [results[number] for number in sorted(results)]


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
