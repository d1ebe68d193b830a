"""Opening requests, which become rows and then groups with a proposer and a rule."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.constraint import Constraint, ThoughtBudget
from ..core.distribution import Distribution
from ..core.loop import PREFILL_CHUNK, Group, chunk_size
from ..core.options import Options
from ..core.proposer import Drafter
from ..core.row import Request, Row
from ..core.statistics import Stopwatch
from ..core.worth import Memory
from ..errors import OptionError
from ..models.exact import exactly
from ..proposers.adapters import Checked
from ..results import INEXACT, Labels
from ..text.prompts import is_chat
from ..text.stream import StopStrings, TextStream
from ..types import TARGET, Cached, Context, Progress, Proposer
from .drafters import (
    FORCING,
    PREDICTING,
    drafters,
    drafting,
    make_proposer,
    most_drafted,
    proposer_kind,
    worth_of,
)
from .pair import Pair
from .prompt_cache import PromptCache
from .request import beginning, for_model, make_noise, make_rule, prepared, rule_name, shown_texts

CHECKPOINT = 16
"""Distance of a cached snapshot from the end of its prompt, in tokens. The next turn may not repeat
the last tokens of a chat template's prompt, such as the beginning of a thought."""
SCORED = 1 << 23
"""Largest number of logits of a chunk whose log-probabilities are computed: 32 MiB in float32. This
takes four times the memory of the logits."""
LEAST_VERIFIED, LEAST_ACCEPTED = 16, 0.1
"""Verified draft tokens after which a drafter is judged, and the least share of them that is
accepted if it fits its target at all. Useful ones reach several times that."""
HOTTEST_JUDGED = 1.0
"""Temperature above which a low acceptance rate is no sign of a wrong drafter. Neither is one under
a constraint."""
CANNOT = "cannot take several sequences in one pass"
"""Part of a message about a model that decodes one sequence at a time; the reason follows."""


@dataclass(eq=False)
class Opener:
    """The opener of requests that are drafted alike: it finds drafters and cached prefixes.

    Attributes:
        pair: Target and drafters.
        options: Options of one request; `drafting` of all requests is equal, or this one counts.
        own: The proposer that a caller passed in place of options, or None.
        progress: Receives the number of prefilled prompt tokens.
        cache: The prefix cache, or None.
        failed: Receives the exceptions that the cache raises.
        batch_size: The largest number of sequences in one pass.
        one_by_one: Whether each request may have a grammar or a prediction.
        batched: Whether several sequences share a pass of the target.
        why_not: The reason if they do not.
        named: The drafters of all rows that the options choose.
        worth: The choice of the draft length of all rows.
        proposer: The proposer of all rows, which has no parts for plain decoding."""

    pair: Pair
    options: Options
    own: Proposer | None
    progress: Progress | None
    cache: PromptCache | None
    failed: Callable[[Exception], object]
    batch_size: int
    one_by_one: bool

    def __post_init__(self) -> None:
        if self.options.exact and (why_not := self.pair.target.exact.why_not):
            raise OptionError(f"{INEXACT} for this model: {why_not}")
        if not self.pair.target.rows_agree:
            self.cache = None
            if self.own is not None:
                self.own, self.options = None, replace(self.options, regular=True)
        pair, options, own = self.pair, self.options, self.own
        bound, _ = for_model(pair, options)
        if own is None:
            self.named = drafters(bound, options)
        else:
            widths = pair.target.vocabulary, pair.vocabulary
            make = lambda setup: Checked(own, *widths)  # noqa: E731
            self.named = (Drafter(type(own).__name__, make, nbytes=1),)
            # The costs of a caller's own proposer are not saved.
            pair, options = replace(pair, learned=Memory()), replace(options, cost_cache=False)
        of_requests = (FORCING, PREDICTING) if self.one_by_one and self.named else ()
        chosen = (*of_requests, *self.named)
        self.why_not = self._reason_against_batches()
        self.batched = self.why_not is None
        self.worth = worth_of(pair, chosen, options)
        self.proposer = make_proposer(chosen, self.worth, batch=self.batched)

    def row(self, number: int, request: Request) -> tuple[Row, Pair]:
        """Return the row of a new request, and its models. Raises PromptError and OptionError."""
        own: Any = request.prompt, request.pair, request.options
        ids, bound, options = prepared(self.pair, *own[::2]) if request.pair is None else own
        longest = len(ids) + options.max_tokens
        pair, bound = self.pair.reaching(longest), bound.reaching(longest)
        if request.ignore_eos:
            bound = replace(bound, eos_token_ids=frozenset())
        prefix = beginning(bound, ids, options)
        grammar = bound.constraint(options, open_end=request.open_end)
        constraint: Constraint | ThoughtBudget | None = grammar
        chat = is_chat(bound.tokenizer, request.prompt, chat_template=options.chat_template)
        # With a grammar, the output begins as the grammar demands, and not with a blank.
        starts = request.answers or chat or constraint is not None
        if request.thoughts is not None and request.thoughts.budget is not None:
            constraint = ThoughtBudget(request.thoughts, bound.vocabulary, grammar)
        shown = {**shown_texts(pair, ids, options), **request.shown}
        most, longest_sequence = most_drafted(pair, options), bound.target.max_length
        room = sys.maxsize if longest_sequence is None else longest_sequence - len(prefix)
        used = self.named if most > 0 or self.own is not None else ()
        # At temperature 0, several rule names mean the same rule class.
        # Two rules with thresholds are never equal.
        thresholds = options.delta, options.posterior_threshold, options.posterior_alpha
        alone = request.scores_prompt or not self.batched
        shares = drafting(self.options), number if alone else -1, pair.target, pair.draft
        alike = replace(options, seed=0, max_tokens=1, stop=())
        row = Row(
            number=number,
            request=request,
            options=options,
            prompt=ids,
            committed=list(prefix),
            distribution=Distribution(options, bound.vocabulary, ids, constraint, len(prefix)),
            random=make_noise(bound, ids, options),
            # EOS does not end a completion that only measures speed.
            eos=bound.eos_token_ids,
            left=min(options.max_tokens, room),
            stream=TextStream(bound.tokenizer, shown, () if starts else prefix),
            stops=StopStrings(tuple(options.stop)),
            key=(*shares, rule_name(options), *thresholds),
            alike=(alike, request.prediction, request.tenant, shares),
            most_drafted=most,
            prediction=[id for id in request.prediction if 0 <= id < pair.vocabulary],
            labels=Labels(
                model=pair.name,
                draft_model=pair.draft_name if any(one.identity for one in used) else None,
                proposer=proposer_kind(used),
                rule=options.rule_name,
                lossy=options.lossy,
                delta=options.delta,
                seed=options.seed,
                num_draft=options.num_draft if used else 0,
                prompt_tokens=len(ids),
                exact=options.exact,
            ),
        )
        return row, pair

    def open(self, rows: list[Row], watch: Stopwatch) -> Group:
        """Return a group of these rows, whose prompts are to be prefilled."""
        first, options = rows[0], rows[0].options
        if not self.batched:
            self.worth.begin(len(first.committed), len(first.prompt), first.remaining)
        cached = [self._cached(row) for row in rows]
        prefixes = [states.pop(TARGET, None) for states in cached]
        context = self.pair.target.open_batch([row.prompt for row in rows], prefixes)
        if options.exact:
            context = exactly(context, self.pair.target.exact.least)
        for row, states, length in zip(rows, cached, context.lengths, strict=True):
            row.began = watch.clock()
            row.processed, row.to_prefill = length, row.committed[length:-1]
            if length or states:
                self.proposer.restore(row, states)
        return Group(
            rows=rows,
            target=context,
            proposer=self.proposer,
            rule=make_rule(options),
            worth=self.worth,
            watch=watch,
            chunk=self._chunk(rows),
            checkpoint=self._checkpoint(first, context),
            progress=self.progress,
        )

    def _checkpoint(self, row: Row, context: Context) -> int:
        """Return how many tokens before the end of a row's prompt its state is cached, or 0 if it
        is cached at the end of the prompt."""
        if self.cache is None:
            return 0
        length = len(row.prompt)
        if self._caches_chunks:
            chunk = self._chunk([row])
            return length - (length - 1) // chunk * chunk
        early = context.checkpoints and length > 4 * CHECKPOINT
        return CHECKPOINT if early and row.processed < length - CHECKPOINT else 0

    @property
    def _caches_chunks(self) -> bool:
        """Whether only whole chunks of prompts are cached. With exact, the bits of other positions
        depend on where a prompt ends."""
        return self.options.exact and self.pair.target.kind == "decoder-only"

    def _chunk(self, rows: Sequence[Row]) -> int:
        """Return the prefill chunk for the prompts of these rows, in tokens per prompt."""
        step, scored = rows[0].options.prefill_step_size, rows[0].request.scores_prompt
        if self.options.exact or scored:
            # The size must not depend on free memory: equal prompts are to be divided alike.
            step = step or PREFILL_CHUNK
        if scored:
            step = min(step or PREFILL_CHUNK, max(1, SCORED // self.pair.target.vocabulary))
        return step or chunk_size(len(rows), holds_scores=self.pair.target.holds_scores)

    def waits(self, row: Row, before: Sequence[Row]) -> bool:
        """Return whether a row should wait for the first one among `before` that begins alike."""
        if self.cache is None or row.request.scores_prompt:
            return False
        tenant, owner = row.request.tenant, self._owner(row)
        if row.behind is None:
            own = (earlier for earlier in before if earlier.request.tenant == tenant)
            alike = (one for one in own if self.cache.waits(row.prompt, one.prompt, owner))
            row.behind = next(alike, None)
        return row.behind in before

    def keep(self, row: Row, group: Group) -> None:
        """Cache the computed state of a row, for later prompts with the same prefix."""
        whole = row.processed < len(row.prompt) and row.processed % self._chunk([row]) == 0
        if self.cache is not None and (whole or not self._caches_chunks):
            self.cache.keep(row.prompt, row.committed, group.snapshot(row), self._owner(row))

    def _owner(self, row: Row) -> str:
        """Return the tenant whose cached prefixes a row may use. Rotary factors for short sequences
        have entries of their own, and so have exact passes with each size of chunks."""
        long = self.pair.reaching(sys.maxsize)
        same = (long.target, long.draft) == (self.pair.target, self.pair.draft)
        exact = f", exact {self._chunk([row])}" if self.options.exact else ""
        return row.request.tenant + ("" if same else ", short") + exact

    def finish(self, row: Row) -> None:
        """Add a finished sequence to the history in which lookup searches for its tenant. Warn,
        once per pair, of a drafter whose draft tokens are hardly ever accepted."""
        if (history := self.pair.history) is not None:
            history.add(row.request.tenant, row.prompt, row.committed)
        hot = row.options.temperature > HOTTEST_JUDGED
        if self.own is not None or hot or row.options.constraint is not None:
            return
        for one in (one for one in self.named if one.nbytes and one.name not in self.pair.judged):
            verified, accepted = self.worth.verified(one.name)
            if verified < LEAST_VERIFIED:
                continue
            self.pair.judged.add(one.name)
            if accepted < LEAST_ACCEPTED * verified:
                shown = one.identity or f"{one.name} of {self.pair.name}"
                rate = f"{accepted:.0f} of {verified:.0f} that were verified"
                warnings.warn(
                    f"hardly any draft tokens are accepted ({rate}): {shown} was probably made for "
                    "another target, or for the model that this one was fine-tuned from",
                    RuntimeWarning,
                    stacklevel=6,
                )

    def _reason_against_batches(self) -> str | None:
        pair = self.pair
        if self.batch_size == 1:
            return "the batch size is 1"
        if self.options.exact:
            return "exact decodes one sequence in a pass"
        if why_not := pair.target.why_not_batched:
            return f"{pair.name} {CANNOT}: {why_not}"
        drafts = any(drafter.name == "draft" for drafter in self.named)
        if drafts and pair.draft and (why_not := pair.draft.why_not_batched):
            return f"{pair.draft_name} {CANNOT}: {why_not}"
        if self.own is not None:
            return "the proposer that was passed drafts for one sequence"
        return None

    def _cached(self, row: Row) -> dict[str, Cached]:
        """Return the cached state of the beginning of a row's prompt, by name. There is none if the
        cache fails, or if the row needs the logits of its prompt, which are not cached."""
        if self.cache is None or row.request.scores_prompt:
            return {}
        # The newest token is left for the first round. A proposer that reads hidden states needs
        # one more token.
        needs = self.proposer.needs
        most = len(self.pair.target.prefix(row.prompt)) - 1 - bool(self.proposer.hidden)
        try:
            found = self.cache.find(row.prompt, most, needs, self._owner(row))
            if found and self._caches_chunks:
                most = found[TARGET].length // (chunk := self._chunk([row])) * chunk
                found = self.cache.find(row.prompt, most, needs, self._owner(row))
        except Exception as problem:
            self.cache.clear()
            self.failed(problem)
            return {}
        if found:
            row.labels = replace(row.labels, cached_tokens=found[TARGET].length)
        return found
