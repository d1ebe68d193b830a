"""Opening requests: their drafters, proposer and draft length, and their decoding."""

import functools
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from .. import process
from ..decoding.loop import CHUNK, Decoding, PromptReader, chunk
from ..decoding.sequence import Batch
from ..decoding.statistics import Stopwatch
from ..draft_length import saved
from ..draft_length.auto import MOST, AutoLength, Source
from ..draft_length.length import DraftLength, FixedLength
from ..errors import OptionError
from ..interfaces import Proposer
from ..interfaces.results import TARGET, Cached
from ..models.exact import ExactContext
from ..options import MOST_EXACT, Options
from ..proposers import DRAFTERS, find, missing
from ..proposers.combined import Checked, FirstOf, Limited, RowByRow
from ..proposers.drafter import Drafter, Setup
from ..proposers.lookup import forcing, predicting
from .pair import Pair
from .prompt_cache import PromptCache
from .request import Job, Overrides, Request, for_model, make_rule, most_drafted

TEMPERATURES = (0.0, 0.4, 0.8, 1.2)
"""Upper bounds of ranges of temperature. All temperatures of a range share the saved acceptance
rates."""
_version = functools.cache(version)
"""Looking it up takes as long as a step of a small model."""


def pair_key(pair: Pair) -> dict[str, str | int]:
    """Return the properties of a pair and a machine on which the costs of rounds depend."""
    return {
        "device": process.device_name(),
        "mlx": _version("mlx"),
        "blas": process.name(),
        "target": pair.name,
        "target_bytes": pair.target.nbytes,
        "dtype": pair.dtype,
    }


def drafting(options: Options) -> tuple[object, ...]:
    """Return the options that decide on drafters, draft length and kind of passes. Requests share
    passes only if these are equal."""
    length, free = (options.num_draft, options.cost_cache), options.constraint is None
    return options.proposer, length, options.regular, options.exact, free


def source(drafter: Drafter, options: Options) -> Source:
    """Return what the choice of the draft length needs to know about a drafter."""
    name = f"{drafter.identity or drafter.name}, {drafter.nbytes} bytes"
    sampled = ", sampled" if options.temperature > 0 else ""
    warmth = bisect_left(TEMPERATURES, options.temperature)
    return Source(
        drafter.name,
        min(drafter.most, MOST_EXACT) if options.exact else drafter.most,
        free=not drafter.nbytes,
        stops=drafter.stops,
        costs=(name if drafter.nbytes else "free") + sampled + (", exact" if options.exact else ""),
        text=f"{name}, {options.rule_name} {options.delta:g}, temperature {warmth}",
    )


def make_draft_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """Return the draft length that the options ask for, with the saved costs of the pair."""
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    if not chosen:
        return FixedLength(0)
    return AutoLength([source(drafter, options) for drafter in chosen], memory(pair, options))


def memory(pair: Pair, options: Options) -> saved.Memory:
    """Return the saved costs of the pair; without `cost_cache`, those of the loaded pair."""
    return saved.memory(pair_key(pair)) if options.cost_cache else pair.learned


CHECKPOINT = 16
"""Distance of a cached snapshot from the end of its prompt, in tokens. The next turn may not repeat
the last tokens of a chat template's prompt, such as the beginning of a thought."""
SCORED = 1 << 23
"""Largest number of logits of a chunk whose log-probabilities are computed: 32 MiB in float32."""
FREE = "ngram"
"""Name of the drafter that costs nothing. `auto` calls it before the one with weights."""


def drafters(pair: Pair, options: Options) -> tuple[Drafter, ...]:
    """Return the drafters of a sequence in the order in which they are called.

    There are none if the target's rows disagree. Raises OptionError if the pair does not have the
    drafter that the options name."""
    if options.regular or options.num_draft == 0 or options.proposer == "none":
        return ()
    if options.proposer in DRAFTERS:
        named = find(options.proposer, pair)
        if named is None:
            raise OptionError(pair.unusable.get(options.proposer) or missing(options.proposer))
        chosen: tuple[Drafter, ...] = (named,)
    else:
        found = (find(name, pair) for name in DRAFTERS)
        chosen = tuple(drafter for drafter in found if drafter and drafter.nbytes)
        measured = options.num_draft == "auto"
        if not measured:
            # The best one is only known if draft lengths are measured.
            chosen = chosen[:1]
        # The free one is called first if it chooses its own length, or if nothing else drafts.
        free = find(FREE, pair)
        if free is not None and (options.proposer == "auto" or measured or not chosen):
            chosen = (free, *chosen)
    if options.constraint is not None:
        chosen = (forcing(pair), *chosen)
    return chosen if pair.target.rows_agree else ()


def make_proposer(
    chosen: Sequence[Drafter],
    options: Options,
    lengths: DraftLength,
    *,
    batch: bool = False,
    tenant: str = "",
) -> Proposer | None:
    """Return the proposer of one sequence or of a batch; None for plain decoding."""
    made: dict[str, Proposer] = {}
    for place, drafter in enumerate(chosen):
        # In a batch the draft of a row depends on the other rows.
        priced = lengths.learns and (drafter.stops or not drafter.nbytes)
        prices = functools.partial(lengths.prices, drafter.name) if priced else None
        setup = Setup(
            options,
            options.ngram_min,
            options.ngram_choice,
            options.constraint,
            followed=place < len(chosen) - 1,
            # Batches often do best without drafts.
            eager=not batch and lengths.eager(drafter.name),
            prices=None if batch else prices,
            tenant=tenant,
        )
        make = functools.partial(drafter.make, setup)
        proposer = make()
        if batch and not proposer.batches:
            proposer = RowByRow(make, prices) if prices else RowByRow(make)
        made[drafter.name] = proposer
    if len(made) > 1:
        return FirstOf(made, lengths.limit)
    return next(iter(made.values()), None)


CANNOT = "cannot take several sequences in one pass"
"""Part of a message about a model that decodes one sequence at a time; the reason follows."""


@dataclass(eq=False)
class Opener:
    """The opener of requests that are drafted alike: it finds drafters and cached prefixes.

    Attributes:
        pair: Target and drafters.
        options: Options of one request; `drafting` of all requests is equal, or this one counts.
        overrides: Objects that a caller passed in place of options.
        cache: The prefix cache, or None.
        failed: Receives the exceptions that the cache raises.
        batch_size: The largest number of sequences in one pass.
        one_by_one: Whether each request may have a grammar or a prediction.
        batched: Whether several sequences share a pass of the target.
        why_not: The reason if they do not.
        lengths: The draft length of all requests."""

    pair: Pair
    options: Options
    overrides: Overrides
    cache: PromptCache | None
    failed: Callable[[Exception], object]
    batch_size: int
    one_by_one: bool

    def __post_init__(self) -> None:
        if self.options.exact:
            if why_not := self.pair.target.why_not_exact:
                raise OptionError(f"exact is impossible for {self.pair.name}: {why_not}")
            self.cache = None
        if not self.pair.target.rows_agree:
            self.cache = None
            if self.overrides.proposer is not None:
                self.overrides = replace(self.overrides, proposer=None)
                self.options = replace(self.options, regular=True)
        options, overrides = self.options, self.overrides
        bound, _ = for_model(self.pair, options)
        self._forced = forcing(bound)
        self._chosen = () if overrides.proposer is not None else drafters(bound, options)
        self.why_not = self._reason_against_batches()
        self.batched = self.why_not is None
        count = options.num_draft
        if overrides.proposer is not None:
            most = MOST_EXACT if options.exact else MOST
            self.lengths: DraftLength = (
                AutoLength([Source(most=most)]) if count == "auto" else FixedLength(count)
            )
        else:
            self.lengths = make_draft_length(self.pair, self.drafters(), options)

    def drafters(self, prediction: Sequence[int] = ()) -> Sequence[Drafter]:
        """Return the drafters of sequences with this prediction, in order."""
        if not (self.one_by_one and self._chosen):
            return self._chosen
        return (self._forced, predicting(prediction), *self._chosen)

    def job(self, number: int, request: Request) -> Job:
        """Create the job of a new request. Raises PromptError and OptionError."""
        alone = request.scores_prompt or not self.batched
        shares = drafting(self.options), number if alone else -1
        return Job.of(self.pair, number, request, self._chosen, self.overrides, shares)

    def open(self, jobs: Sequence[Job], watch: Stopwatch) -> Decoding:
        options = jobs[0].options
        prompts = [job.ids for job in jobs]
        if not self.batched:
            sequence = jobs[0].sequence
            self.lengths.begin(len(sequence.committed), len(prompts[0]), sequence.remaining)
        proposer = self._make_proposer(jobs)
        if self.overrides.proposer is not None:
            widths = self.pair.target.vocabulary, self.pair.vocabulary
            proposer = Checked(self.overrides.proposer, *widths)
        cached = [self._cached(job, proposer) for job in jobs]
        prefixes = [states.pop(TARGET, None) for states in cached]
        context = self.pair.target.open_batch(prompts, prefixes)
        if options.exact:
            context = ExactContext(context)
        length = len(prompts[0])
        early = self.cache is not None and context.checkpoints and length > 4 * CHECKPOINT
        for job in jobs:
            job.began = watch.clock()
        reader = PromptReader(
            context,
            [job.sequence.committed for job in jobs],
            prompts,
            proposer,
            self.overrides.progress,
            self._step_size(jobs),
            cached,
            checkpoint=length - CHECKPOINT if early else 0,
            score=jobs[0].sequence.score if jobs[0].scores_prompt else None,
            clock=watch.clock,
        )
        return Decoding(
            target=context,
            proposer=proposer,
            rule=make_rule(options),
            batch=Batch([job.sequence for job in jobs]),
            draft_length=self.lengths,
            reader=reader,
            watch=watch,
            delta=options.delta,
        )

    def _step_size(self, jobs: Sequence[Job]) -> int:
        """Return the prefill chunk for the prompts of these jobs, in tokens per prompt."""
        step = jobs[0].options.prefill_step_size
        if self.options.exact or jobs[0].scores_prompt:
            # The size must not depend on free memory: equal prompts are to be divided alike.
            step = step or CHUNK
        if jobs[0].scores_prompt:
            step = min(step or CHUNK, max(1, SCORED // self.pair.target.vocabulary))
        return step or chunk(len(jobs), holds_scores=self.pair.target.holds_scores)

    def waits(self, job: Job, before: Sequence[Job]) -> bool:
        """Return whether a job should wait for the first one among `before` that begins alike."""
        if self.cache is None or job.scores_prompt:
            return False
        if job.behind is None:
            job.behind = next(
                (
                    earlier
                    for earlier in before
                    if earlier.tenant == job.tenant
                    and self.cache.waits(job.ids, earlier.ids, self._owner(job))
                ),
                None,
            )
        return job.behind in before

    def keep(self, job: Job, decoding: Decoding) -> None:
        """Cache the computed state of a job, for later prompts with the same prefix."""
        if self.cache is not None:
            row = decoding.sequences.index(job.sequence)
            computed = decoding.reusable(row)
            self.cache.keep(job.ids, job.sequence.committed, computed, self._owner(job))

    def _owner(self, job: Job) -> str:
        """Return the tenant whose cached prefixes a job may use. Rotary factors for short sequences
        have entries of their own."""
        models = job.pair.reaching(sys.maxsize)
        long = (models.target, models.draft) == (job.pair.target, job.pair.draft)
        return job.tenant if long else f"{job.tenant}, short"

    def remember(self, job: Job) -> None:
        """Add a finished sequence to the history in which lookup searches for the tenant."""
        if (history := self.pair.history) is not None:
            history.add(job.tenant, job.ids, job.sequence.committed)

    def _reason_against_batches(self) -> str | None:
        pair = self.pair
        if self.batch_size == 1:
            return "the batch size is 1"
        if self.options.exact:
            return "exact decodes one sequence in a pass"
        if why_not := pair.target.why_not_batched:
            return f"{pair.name} {CANNOT}: {why_not}"
        drafts = any(drafter.name == "draft" for drafter in self._chosen)
        if drafts and pair.draft and (why_not := pair.draft.why_not_batched):
            return f"{pair.draft_name} {CANNOT}: {why_not}"
        if self.overrides.proposer is not None:
            return "the proposer that was passed drafts for one sequence"
        return None

    def _make_proposer(self, jobs: Sequence[Job]) -> Proposer | None:
        first = jobs[0]
        proposer = make_proposer(
            self.drafters(first.prediction),
            first.options,
            self.lengths,
            batch=self.batched,
            tenant=first.tenant,
        )
        limits = [most_drafted(job.options) for job in jobs]
        limited = self.batched or limits[0] < most_drafted(self.options)
        return Limited(proposer, limits) if proposer is not None and limited else proposer

    def _cached(self, job: Job, proposer: Proposer | None) -> dict[str, Cached]:
        """Return the cached state of the beginning of a job's prompt, by name. There is none if the
        cache fails, or if the job needs the logits of its prompt, which are not cached."""
        if self.cache is None or job.scores_prompt:
            return {}
        try:
            owner = self._owner(job)
            beginning = self.cache.beginning(self.pair.target, job.ids, proposer, owner)
        except Exception as problem:
            self.cache.clear()
            self.failed(problem)
            return {}
        if beginning:
            job.labels = replace(job.labels, cached_tokens=beginning[TARGET].length)
        return beginning
