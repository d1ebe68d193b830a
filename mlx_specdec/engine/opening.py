"""How a group of prompts that are read together begins: who drafts for it, and what is cached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..decoding.loop import Decoding
from ..decoding.prompt import PromptReader
from ..decoding.sequence import Batch
from ..decoding.stopwatch import Stopwatch
from ..draft_length.length import DraftLength
from ..interfaces import Proposer
from ..interfaces.reusable import NOTHING, Beginning
from ..options import Options
from ..proposers import given
from ..proposers.combined import Limited
from ..proposers.drafter import Drafter
from .drafters import drafters, make_proposer
from .generate import make_rule
from .jobs import Failures, Job, most_drafted
from .pair import Pair
from .prepare import for_model
from .prompt_cache import PromptCache

log = logging.getLogger(__name__)


class Opening:
    """Makes the decodings of groups, for options that all have in common.

    cache: what was computed of earlier prompts is not computed again; not used for a target whose
    rows disagree, see models.base. failures: counts those of the cache, which end no
    text. one_by_one: whether
    prompts come so; each may then say what its text may turn out to be.
    """

    def __init__(
        self,
        pair: Pair,
        options: Options,
        cache: PromptCache | None,
        failures: Failures,
        *,
        one_by_one: bool,
    ) -> None:
        self._failures = failures
        self._pair = pair
        self._cache = cache if cache is not None and pair.target.rows_agree else None
        bound, _ = for_model(pair, options)
        self.chosen: Sequence[Drafter] = drafters(bound, options)
        self._forced = given.drafter(bound)
        self._predicts = one_by_one and bool(self.chosen)

    def asked(self, expected: Sequence[int]) -> Sequence[Drafter]:
        """Who drafts for sequences that may turn out to be as expected, and may be bound."""
        if not self._predicts:
            return self.chosen
        return (self._forced, given.predicting(expected), *self.chosen)

    def waits(self, job: Job, before: Sequence[Job]) -> bool:
        """Return whether a job should wait until a prompt among `before` that begins alike has been
        read. A job waits for one other job only."""
        if self._cache is None:
            return False
        if job.behind is None:
            waits = self._cache.waits
            job.behind = next((each for each in before if waits(job.ids, each.ids)), None)
        return job.behind in before

    def open(
        self, group: Sequence[Job], lengths: DraftLength, watch: Stopwatch, batched: bool
    ) -> Decoding:
        """The decoding of these prompts, of which nothing is read yet."""
        options = group[0].options
        prompts = [job.ids for job in group]
        model = self._pair.target
        chosen = self.asked(group[0].prediction)
        proposer = make_proposer(chosen, options, lengths, batch=batched)
        if proposer is not None:
            proposer = Limited(proposer, [most_drafted(job.options) for job in group])
        known = [self._beginning(job, proposer) for job in group]
        kept = [each.target for each in known]
        context = model.open_batch(prompts, kept) if batched else model.open(prompts[0], kept[0])
        sequences = [job.sequence for job in group]
        for job in group:
            job.began = watch.clock()
        return Decoding(
            target=context,
            proposer=proposer,
            rule=make_rule(options),
            batch=Batch(sequences),
            draft_length=lengths,
            reader=PromptReader(
                context,
                [each.committed for each in sequences],
                prompts,
                proposer,
                step_size=options.prefill_step_size,
                kept=[each.proposer for each in known],
            ),
            watch=watch,
        )

    def keep(self, job: Job, decoding: Decoding) -> None:
        """What was computed of a job, for later prompts that begin alike."""
        if self._cache is not None:
            row = decoding.sequences.index(job.sequence)
            self._cache.keep(job.ids, job.sequence.committed, decoding.memories(row))

    def forget(self) -> None:
        """Clear the cache after a text with damaged numbers, some of which may be cached."""
        if self._cache is not None:
            self._cache.clear()

    def _beginning(self, job: Job, proposer: Proposer | None) -> Beginning:
        if self._cache is None:
            return NOTHING
        try:
            known = self._cache.beginning(self._pair.target, job.ids, proposer)
        except Exception as problem:
            # What cannot be recalled is read again.
            log.exception("the prompt cache has failed")
            self._failures.note(problem)
            self._cache.clear()
            return NOTHING
        job.cached_tokens = known.cached_tokens
        return known
