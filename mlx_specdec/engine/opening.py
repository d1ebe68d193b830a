"""The opener: makes the job of a request, and the decoding of jobs that are read together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..decoding.loop import Decoding
from ..decoding.prompt import PromptReader
from ..decoding.sequence import Batch
from ..decoding.stopwatch import Stopwatch
from ..draft_length.auto_length import AutoLength
from ..draft_length.length import DraftLength, FixedLength
from ..interfaces import Model, Proposer
from ..interfaces.reusable import NOTHING, CachedPrefix
from ..interfaces.rounds import RoundListener
from ..options import Options
from ..proposers import given
from ..proposers.combined import Limited
from ..proposers.drafter import Drafter
from ..testing import Shadow, checked
from .drafters import drafters, keep_costs, make_draft_length, make_proposer
from .pair import Pair
from .prompt_cache import PromptCache
from .request import Job, Overrides, Request, for_model, make_rule, most_drafted

DEBUG = "MLX_SPECDEC_DEBUG"
"""Environment variable: compare every context with the committed tokens after every round."""


class Opener:
    """Opens requests that share options: which drafters they have, and what is cached of them.

    cache: not used for a target whose rows disagree, see models.base. failed: called with what the
    cache raises. one_by_one: whether each request may have a grammar or a prediction of its own.
    batched: whether several sequences go through one pass. why_not: the reason otherwise. lengths:
    chooses how many tokens are drafted.
    """

    def __init__(
        self,
        pair: Pair,
        options: Options,
        overrides: Overrides,
        cache: PromptCache | None,
        failed: Callable[[Exception], object],
        *,
        batch_size: int,
        one_by_one: bool,
    ) -> None:
        if overrides.proposer is not None and not pair.target.rows_agree:
            overrides, options = replace(overrides, proposer=None), replace(options, regular=True)
        self._target: Model = pair.target
        self._shadows: list[Shadow] = []
        if os.environ.get(DEBUG):
            self._target, draft, self._shadows = checked(pair.target, pair.draft, pair.translation)
            pair = replace(pair, draft=draft)
        self._pair = pair
        self._options = options
        self._overrides = overrides
        self._failed = failed
        self._one_by_one = one_by_one
        self._cache = cache if cache is not None and pair.target.rows_agree else None
        bound, _ = for_model(pair, options)
        self._forced = given.drafter(bound)
        self._chosen = () if overrides.proposer is not None else drafters(bound, options)
        self.why_not = self._reason_against_batches(batch_size)
        self.batched = self.why_not is None
        self.lengths = overrides.draft_length or self._make_lengths()

    @property
    def listeners(self) -> Sequence[RoundListener]:
        """What has to hear of every round."""
        return [self.lengths, *self._shadows]

    def drafters(self, prediction: Sequence[int] = ()) -> Sequence[Drafter]:
        """Return the drafters of sequences with this prediction, in the order in which they are
        called."""
        if not (self._one_by_one and self._chosen):
            return self._chosen
        return (self._forced, given.predicting(prediction), *self._chosen)

    def job(self, number: int, request: Request) -> Job:
        """Create the job of a new request. Raises PromptError and OptionError."""
        return Job.of(self._pair, number, request, self._chosen, self._overrides)

    def open(self, jobs: Sequence[Job], watch: Stopwatch) -> Decoding:
        """Return the decoding of these jobs, of whose prompts nothing is read yet."""
        for shadow in self._shadows:
            shadow.forget()
        options = jobs[0].options
        prompts = [job.ids for job in jobs]
        proposer = self._overrides.proposer or self._make_proposer(jobs)
        cached = [self._cached(job, proposer) for job in jobs]
        kept = [each.target for each in cached]
        if self.batched:
            context = self._target.open_batch(prompts, kept)
        else:
            context = self._target.open(prompts[0], kept[0])
        for job in jobs:
            job.began = watch.clock()
        sequences = [job.sequence for job in jobs]
        return Decoding(
            target=context,
            proposer=proposer,
            rule=self._overrides.rule or make_rule(options),
            batch=Batch(sequences),
            draft_length=self.lengths,
            reader=PromptReader(
                context,
                [each.committed for each in sequences],
                prompts,
                proposer,
                self._overrides.progress,
                options.prefill_step_size,
                [each.proposer for each in cached],
            ),
            watch=watch,
        )

    def waits(self, job: Job, before: Sequence[Job]) -> bool:
        """Return whether a job should wait until a prompt among `before` that begins alike has been
        read. A job waits for one other job only."""
        if self._cache is None:
            return False
        if job.behind is None:
            waits = self._cache.waits
            job.behind = next((each for each in before if waits(job.ids, each.ids)), None)
        return job.behind in before

    def keep(self, job: Job, decoding: Decoding) -> None:
        """Cache what was computed of a job, for later prompts that begin alike."""
        if self._cache is not None:
            row = decoding.sequences.index(job.sequence)
            self._cache.keep(job.ids, job.sequence.committed, decoding.reusable(row))

    def forget(self) -> None:
        """Clear the cache after a text with damaged numbers, some of which may be cached."""
        if self._cache is not None:
            self._cache.clear()

    def save_costs(self) -> None:
        """Save what rounds have cost and what was accepted, for later runs; nothing of a proposer
        or of draft lengths that a caller has passed."""
        if self._overrides.proposer is None and self._overrides.draft_length is None:
            keep_costs(self._pair, self._options, self.lengths)

    def _reason_against_batches(self, batch_size: int) -> str | None:
        pair = self._pair
        if batch_size == 1:
            return "the batch size is 1"
        if self._shadows:
            return f"{DEBUG} compares one sequence at a time"
        if not pair.target.batches:
            return f"{pair.name} cannot take several sequences in one pass"
        drafts = any(each.name == "draft" for each in self._chosen)
        if drafts and pair.draft and not pair.draft.batches:
            return f"{pair.draft_name} cannot take several sequences in one pass"
        if self._overrides.proposer is not None:
            return "the proposer that was passed drafts for one sequence"
        return None

    def _make_lengths(self) -> DraftLength:
        if self._overrides.proposer is not None:
            count = self._options.num_draft
            return AutoLength() if count == "auto" else FixedLength(count)
        return make_draft_length(self._pair, self.drafters(), self._options)

    def _make_proposer(self, jobs: Sequence[Job]) -> Proposer | None:
        chosen, options = self.drafters(jobs[0].prediction), jobs[0].options
        proposer = make_proposer(chosen, options, self.lengths, batch=self.batched)
        limits = [most_drafted(job.options) for job in jobs]
        limited = self.batched or limits[0] < most_drafted(self._options)
        return Limited(proposer, limits) if proposer is not None and limited else proposer

    def _cached(self, job: Job, proposer: Proposer | None) -> CachedPrefix:
        """Return what the cache has of a job's prompt. What cannot be recalled is read again."""
        if self._cache is None:
            return NOTHING
        try:
            beginning = self._cache.beginning(self._pair.target, job.ids, proposer)
        except Exception as problem:
            self._cache.clear()
            self._failed(problem)
            return NOTHING
        job.labels = replace(job.labels, cached_tokens=beginning.cached_tokens)
        return beginning
