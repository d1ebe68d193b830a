"""Many prompts decoded together: who is read when, who joins, and what each of them became.

A group of prompts is read beside the running batch, a chunk a step, and joins it as a whole.
Prompts of a window are taken in the order of their lengths: little of a rectangle is then padding.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import mlx.core as mx

from .assemble import (
    Pair,
    environment,
    make_labels,
    make_rule,
    make_sequence,
    prepared,
)
from .checkpoints.disk.sizes import memory
from .decoding.batch_size import AutoBatchSize, BatchSize, FixedBatchSize
from .decoding.loop import Decoding
from .decoding.margins import DAMAGED
from .decoding.prompt import PromptReader
from .decoding.rounds import RoundReport
from .decoding.run import Labels, Result
from .decoding.sequence import Batch
from .decoding.sequence import Sequence as Decoded
from .decoding.statistics import Recorder
from .decoding.stop_criteria import Emission
from .decoding.stopwatch import Stopwatch
from .drafters import drafters, keep_costs, make_batch_length, make_proposer
from .drafting.drafter import Drafter
from .errors import DecodingError, OptionError, PromptError, SpecdecError
from .models.base import check_prompt
from .options import Options
from .sampling.settings import integer
from .text.chat import Messages

Prompt = str | Sequence[int] | Messages

WINDOW = 8
"""Prompts that are sorted by length together, in batches."""
JOINS_AT = 0.25
"""Share of the batch that has to be free before others are read: rows are copied when they join."""


@dataclass(frozen=True)
class Request:
    """A prompt with settings of its own."""

    prompt: Prompt
    options: Options


@dataclass(frozen=True)
class Part:
    """What one step gave for one prompt.

    number: of the prompt, counted from 0. result: with the last part. error: why there is none.
    """

    number: int
    emission: Emission
    result: Result | None = None
    error: str | None = None

    @property
    def last(self) -> bool:
        """Whether nothing more comes for this prompt."""
        return self.result is not None or self.error is not None


@dataclass
class _Job:
    """A prompt on its way. alike: what it has in common with those that it may begin with."""

    number: int
    options: Options
    ids: list[int]
    sequence: Decoded
    alike: Options
    recorder: Recorder = field(default_factory=Recorder)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0
    read: float = 0.0


class ManyRun:
    """Iterate to decode; see `stream_many`.

    batched: whether several sequences go through one pass. why_not: the reason otherwise.
    """

    def __init__(
        self, pair: Pair, requests: Iterable[Request], options: Options, batch_size: BatchSize
    ) -> None:
        self._pair = pair
        self._options = options
        self._requests = iter(enumerate(requests))
        self._chosen: Sequence[Drafter] = drafters(pair, options)
        self.why_not = _why_not(pair, self._chosen, batch_size.size)
        self.batched = self.why_not is None
        self._size = batch_size if self.batched else FixedBatchSize(1)
        self._lengths = make_batch_length(pair, self._chosen, options)
        self._watch = Stopwatch([self._lengths, self], wanted=lambda: self._lengths.wants_parts)
        self._waiting: list[_Job] = []
        self._failed: list[Part] = []
        self._reading: Decoding | None = None
        self._running: Decoding | None = None
        self._rule_key: object = None
        self._jobs: dict[Decoded, _Job] = {}
        self._begun = 0
        self._exhausted = False
        self._window_began = 0.0
        self._window_tokens = 0

    @property
    def batch_size(self) -> int:
        """How many sequences may go through one pass now."""
        return self._size.size

    def __iter__(self) -> Iterator[Part]:
        """The parts still to come, in the order in which they are decoded."""
        try:
            yield from self._parts()
        finally:
            keep_costs(self._pair, self._chosen, self._options, self._lengths)

    def _parts(self) -> Iterator[Part]:
        while True:
            self._admit()
            failed, self._failed = self._failed, []
            yield from failed
            if self._reading is not None:
                self._read()
            if self._running is not None:
                yield from self._step(self._running)
            elif self._reading is None and not self._waiting and self._exhausted:
                return

    def on_round(self, report: RoundReport) -> None:
        """As decoding.rounds.RoundListener says: every sequence has figures of its own."""
        running = self._running
        assert running is not None
        for sequence, each in zip(running.sequences, report.sequences, strict=True):
            job = self._jobs.get(sequence)
            if job is None:
                continue
            try:
                job.recorder.on_round(replace(report, sequences=(each,), ended=each.ended))
            except DecodingError:
                sequence.finish("damaged")

    def _admit(self) -> None:
        """Begin to read a group, where there is room for one."""
        if self._reading is not None:
            return
        if not self._waiting:
            self._fill_window()
        if not self._waiting:
            return
        room = self.batch_size - self._begun
        key = _rule_key(self._waiting[0].options)
        if self._begun and (room < max(1, JOINS_AT * self.batch_size) or key != self._rule_key):
            return
        group: list[_Job] = []
        alike = self._waiting[0].alike
        while self._waiting and len(group) < room and self._waiting[0].alike == alike:
            group.append(self._waiting.pop(0))
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
            try:
                ids, pair, options = prepared(self._pair, request.prompt, request.options)
                target = self._pair.target
                check_prompt(ids, target.vocabulary, target.max_length)
            except SpecdecError as problem:
                self._failed.append(Part(number, Emission((), ()), error=str(problem)))
                continue
            sequence = make_sequence(pair, ids, options)
            alike = replace(options, seed=0, max_tokens=1, stop=())
            self._jobs[sequence] = job = _Job(number, options, ids, sequence, alike)
            self._waiting.append(job)
        self._waiting.sort(key=lambda job: (repr(job.alike), len(job.ids)))

    def _open(self, group: Sequence[_Job]) -> Decoding:
        options = group[0].options
        prompts = [job.ids for job in group]
        model = self._pair.target
        context = model.open_batch(prompts) if self.batched else model.open(prompts[0])
        proposer = make_proposer(self._chosen, options, self._lengths, batch=self.batched)
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
            ),
            watch=self._watch,
        )

    def _read(self) -> None:
        """A chunk of the newcomers' prompts; they join when all is read."""
        reading = self._reading
        assert reading is not None
        if reading.reading:
            reading.step()
        if reading.reading:
            return
        for sequence in reading.sequences:
            self._jobs[sequence].read = self._watch.clock()
        if self._running is None:
            self._running = reading
        else:
            self._running.join(reading)
        self._reading = None

    def _step(self, running: Decoding) -> Iterator[Part]:
        emissions = running.step()
        for sequence, emission in zip(running.sequences, emissions, strict=True):
            if sequence in self._jobs:
                yield self._part(sequence, emission)
        if not running.joins and all(each.ended for each in running.sequences):
            self._running = None

    def _part(self, sequence: Decoded, emission: Emission) -> Part:
        job = self._jobs[sequence]
        job.texts.append(emission.text)
        job.tokens += emission.tokens
        self._window_tokens += len(emission.tokens)
        if not sequence.ended:
            return Part(job.number, emission)
        del self._jobs[sequence]
        self._begun -= 1
        try:
            return Part(job.number, emission, self._result(job, emission))
        except DecodingError as problem:
            return Part(job.number, emission, error=str(problem))

    def _result(self, job: _Job, emission: Emission) -> Result:
        if emission.finish_reason is None or emission.finish_reason == "damaged":
            raise DecodingError(DAMAGED)
        labels: Labels = make_labels(self._pair, job.options, self._chosen, len(job.ids))
        here = environment(self._pair)
        stats = job.recorder.summary(
            load=here.load_seconds,
            prompt=job.read - job.began,
            decoding=self._watch.clock() - job.read,
            peak_memory_bytes=here.peak_memory(),
            device=here.device,
            blas=here.blas,
        )
        return Result("".join(job.texts), tuple(job.tokens), emission.finish_reason, labels, stats)


def stream_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
) -> ManyRun:
    """Decode many prompts, up to `batch_size` of them in one pass of the target; "auto" takes what
    brings most tokens a second.

    prompts: may be an endless iterator; a Request has options of its own, of which proposer, rule
    and draft length must be those of `options`. A completion is what its prompt becomes alone.
    Where the model cannot take several sequences, they are decoded one after the other.
    Raises OptionError, and PromptError for a text in place of a list.
    """
    options = options or Options()
    if batch_size != "auto" and integer("batch-size", batch_size) < 1:
        raise OptionError(f"batch-size must be 1 or more, not {batch_size}")
    if isinstance(prompts, str | bytes):
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


def _rule_key(options: Options) -> object:
    """What sequences of one batch have in common: the rule, which is another one where a greedy
    text draws nothing."""
    rule = type(make_rule(options))
    return rule, options.delta, options.posterior_threshold, options.posterior_alpha
