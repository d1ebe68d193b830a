"""The decoding loop: prefill, then rounds of propose, verify, commit and rewind, or pipelined plain
decoding steps. A round does no arithmetic of its own and blocks on the device only once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from .. import system
from ..errors import DecodingError
from ..results import Step
from ..types import (
    TARGET,
    Context,
    Noise,
    Progress,
    Proposal,
    Reusable,
    Rule,
    Scores,
    Verdict,
    feed,
    no_proposal,
)
from .distribution import log_probabilities
from .noise import noise_of
from .proposer import GroupProposer
from .row import Row, token_logprobs
from .statistics import Stopwatch
from .worth import Worth

ALL_CORES_FROM = 128
"""Tokens of the prompts from which MKL uses all cores in their prefill. Its threads spin afterwards
for a while, which makes the rounds after a short prompt 4 % slower."""
PREFILL_CHUNK = 512
"""Prefill chunk on a CPU, in tokens. Larger chunks are slower there and need more memory."""
LARGE_CHUNK = 2048
"""Prefill chunk on an accelerator with fused attention, in tokens; the value of mlx-lm."""
ROOM = 4 << 30
"""Free memory per prompt, in bytes, that LARGE_CHUNK requires. Should MLX not fuse attention, 32
heads at 16,000 tokens need 2 GB for the scores in half precision."""


def chunk_size(prompts: int, *, holds_scores: bool) -> int:
    """Return the prefill chunk on this machine, in tokens per prompt, for a number of prompts.
    holds_scores: See `models.base.Base.holds_scores`."""
    if holds_scores or mx.default_device() == mx.Device(mx.cpu):
        return PREFILL_CHUNK
    free = system.usable_memory() - mx.get_active_memory()
    return LARGE_CHUNK if free >= prompts * ROOM else PREFILL_CHUNK


CLEAR_EVERY = 256
"""Interval, in tokens, at which MLX frees its unused buffers. A growing KV cache leaves buffers
whose sizes are never needed again."""
GROWN = 2
"""Tokens past a multiple of CLEAR_EVERY at which MLX frees them. Caches grow just before."""


@dataclass(frozen=True)
class _Pass:
    """A target pass in flight, whose verdict the host has not read."""

    proposal: Proposal
    scores: Scores
    verdict: Verdict


@dataclass(eq=False, kw_only=True)
class Group:
    """The rows that share passes. Call `step` until every row has a finish reason.

    Attributes:
        rows: The rows. One that has ended stays until no pass is in flight.
        target: The target's context of these rows, which may already hold cached tokens.
        proposer: The source of draft tokens, which the loop calls as `worth` chooses.
        worth: Chooses the draft length.
        watch: Times the stages of each round.
        chunk: Tokens per row and pass of the prefill; see `chunk_size`.
        shorter: The most tokens of the next chunk; None for `chunk`.
        pace: Tokens per second of the newest chunk; 0 if that is not known.
        checkpoint: How many tokens before the end of the first row's prompt a chunk must end,
            because the state is cached there; 0 means nowhere.
        progress: Receives the tokens done and the length of the longest prompt."""

    rows: list[Row]
    target: Context
    proposer: GroupProposer
    rule: Rule
    worth: Worth
    watch: Stopwatch
    chunk: int = PREFILL_CHUNK
    shorter: int | None = None
    pace: float = 0.0
    checkpoint: int = 0
    progress: Progress | None = None
    begun: bool = field(default=False, init=False)
    _in_flight: _Pass | None = field(default=None, init=False)
    _joining: list[Group] = field(default_factory=list, init=False)
    _cleared: int = field(default=0, init=False)
    _broken: bool = field(default=False, init=False)

    @property
    def members(self) -> list[Row]:
        """The rows, and those that are about to join."""
        return [*self.rows, *(row for other in self._joining for row in other.rows)]

    @property
    def to_prefill(self) -> int:
        """How many tokens of the longest prompt are not prefilled yet."""
        return max(len(row.to_prefill) for row in self.rows)

    @property
    def prefilling(self) -> bool:
        """Whether the prefill is not over. An encoder runs in the prefill."""
        return not self.begun or self.to_prefill > 0

    @property
    def to_cache(self) -> bool:
        """Whether to cache the state now: at the checkpoint, or at the end if there is none."""
        if self.checkpoint:
            return len(self.rows[0].to_prefill) == self.checkpoint - 1
        return not self.prefilling

    def join(self, other: Group) -> None:
        """Append the rows of another group of the same kind, as soon as no pass is in flight. The
        other group has finished its prefill and must not be used afterwards."""
        self._joining.append(other)

    def snapshot(self, row: Row) -> dict[str, Reusable]:
        """Return the cacheable state of one of the rows, by name. It is empty before the first step
        and after an interrupted step."""
        if self._broken or not self.begun or row not in self.rows:
            return {}
        return {**self.proposer.snapshot(row), TARGET: self.target.snapshot(self.rows.index(row))}

    def step(self) -> list[Step]:
        """Remove ended rows, add waiting ones, then prefill one chunk or run one round.

        Returns one step per row, which is empty in a prefill. Raises DecodingError if an exception
        interrupted an earlier step, which leaves the state inconsistent."""
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        if self._in_flight is None and self.begun:
            self._leave_and_join()
        if self.prefilling:
            self._prefill()
            steps = [Step(row.number) for row in self.rows]
        elif remaining := max([row.remaining for row in self.rows]):
            steps = self._round(remaining)
        else:
            steps = [row.finish("length") for row in self.rows]
        self._broken = False
        grown = (max([len(row.committed) for row in self.rows]) - GROWN) // CLEAR_EVERY
        if grown != self._cleared:
            self._cleared = grown
            mx.clear_cache()
        return steps

    def _prefill(self) -> None:
        """Prefill one chunk and wait for it. An encoder runs with the first chunk."""
        if not self.begun:
            self._report()
            self.begun = True
        rows, size = self.rows, min(self.chunk, self.shorter or self.chunk)
        if len(rows[0].to_prefill) >= self.checkpoint > 0:
            size = min(size, len(rows[0].to_prefill) - self.checkpoint + 1)
        chunks = [row.to_prefill[:size] for row in rows]
        scores = Scores(mx.zeros((len(rows), 0, 1)))
        long = sum(len(row.prompt) for row in rows) >= ALL_CORES_FROM
        with system.all_cores(long):
            if any(chunks):
                scores = feed(self.target, chunks, self.proposer.hidden)
            self.target.evaluate()
        self.watch.interrupt()
        for place, (row, tokens) in enumerate(zip(rows, chunks, strict=True)):
            row.seen, row.to_prefill = tokens, row.to_prefill[size:]
            row.processed += len(tokens)
            if row.request.scores_prompt and tokens:
                first = row.processed - len(tokens) + 1
                row.score(scores.logits[place], row.committed[first : first + len(tokens)])
        began = self.watch.clock()
        self.proposer.observe(rows, scores)
        seconds = self.watch.clock() - began
        for row in rows:
            row.drafting += seconds
        self._report()

    def _report(self) -> None:
        """Report the progress of the prefill."""
        if self.progress is not None:
            longest = max(len(row.prompt) for row in self.rows)
            processed = min(row.processed for row in self.rows)
            self.progress(processed if self.prefilling else longest, longest)

    def _round(self, remaining: int) -> list[Step]:
        """Propose, submit a target pass, and commit the accepted tokens."""
        rows, most = self.rows, self.worth.choose(remaining, len(self.rows))
        limits = [max(0, min(most, row.most_drafted, row.remaining - 1)) for row in rows]
        drafts = any(limits)
        current, self._in_flight = self._in_flight, None
        self.watch.begin(drafts=drafts and current is None)
        if current is None:
            noise, proposal = noise_of([row.noise(0) for row in rows]), no_proposal(len(rows))
            if drafts:
                proposal = self._cut(self.proposer.propose(rows, limits, noise))
                self.watch.drafted(proposal)
            current = self._submit(proposal, noise)
        ahead = current.proposal.size == 0 and remaining > 1
        # A constraint on the token after the next one needs the next one for its mask.
        ahead = ahead and not (self._bound(2) or self._joining or any(row.ended for row in rows))
        # A draft starts from the token of this step. Without a draft, the pipeline stays full.
        if ahead and not (drafts and self.proposer.ready(rows, limits)):
            noise, chosen = noise_of([row.noise(1) for row in rows]), current.verdict.next[:, None]
            self._in_flight = self._submit(current.proposal, noise, chosen)
        return self._commit(current)

    def _submit(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
        """Submit a target pass over one token per row and the proposal after it. That token is
        `chosen`, (batch, 1) int32, of the previous pass, or by default the newest committed one,
        which is not in the KV cache yet."""
        newest = chosen
        if newest is None:
            newest = mx.array([row.committed[-1:] for row in self.rows], dtype=mx.int32)
        tokens = mx.concatenate([newest, proposal.tokens], axis=1) if proposal.size else newest
        scores = self.target.advance(tokens, proposal.size, self.proposer.hidden)
        self.watch.advanced(scores)
        following = proposal.tokens if chosen is None else chosen
        committed = [row.committed for row in self.rows]
        distributions = [row.distribution for row in self.rows]
        log_p = log_probabilities(distributions, scores.logits, committed, following)
        delta = self.rows[0].options.delta
        verdict = self.rule(log_p, proposal.for_rules(), noise, delta)
        mx.async_eval(verdict.next, verdict.accepted)
        return _Pass(proposal, scores, verdict)

    def _commit(self, done: _Pass) -> list[Step]:
        """Wait for the verdict, commit the accepted tokens and rewind the rejected ones."""
        rows, proposal = self.rows, done.proposal
        live = [row for row in rows if not row.ended]
        steps = self._committed(done)
        if not all(row.ended for row in rows):
            if proposal.size:
                self.target.rewind(tuple([row.processed for row in rows]))
            self.proposer.observe(rows, done.scores)
        timed = self.watch.finish(proposal, pipelined=self._in_flight is not None)
        for row, step in zip(rows, steps, strict=True):
            if row in live:
                row.rounds.append((step, timed))
        self.worth.learn(rows, steps, proposal, timed)
        return steps

    def _committed(self, done: _Pass) -> list[Step]:
        """Wait for the verdict and commit its tokens. Return the steps, with log-probabilities if
        the row requests them. A row ends with "damaged" if its logits are NaN or infinite, and with
        "failed" after an exception, which is raised if there is only one row."""
        following: Any = done.verdict.next.tolist()
        self.watch.judged(self)
        size = done.proposal.size
        accepted: Any = done.verdict.accepted.tolist() if size else None
        drafted: Any = done.proposal.tokens.tolist() if size else None
        steps = []
        for place, row in enumerate(self.rows):
            count, tokens = 0, [following[place]]
            if size:
                count = sum(accepted[place])
                tokens = [*drafted[place][:count], following[place]]
            before, top = len(row.committed), row.request.top_logprobs
            try:
                step = row.commit(tokens, count)
                if top is not None and step.tokens:
                    logits, width = done.scores.logits[place], row.distribution.vocabulary
                    found = token_logprobs(logits, step.tokens, top, width)
                    step = replace(step, logprobs=found)
            except Exception as problem:
                if len(self.rows) == 1:
                    raise
                step = row.fail(problem)
                # The group still runs passes over this row.
                row.committed[before:] = [max(0, token) for token in tokens]
            if size and (n := done.proposal.count(place)):
                n = min(n, len(step.tokens)) if row.ended else n
                step = replace(step, drafted=n, proposer=done.proposal.source_of(place))
            row.seen, row.processed = row.committed[before - 1 : -1], len(row.committed) - 1
            steps.append(step)
        return steps

    def _bound(self, count: int) -> bool:
        """Return whether a constraint may exclude one of the next `count` tokens of a row."""
        return any(row.distribution.bound(count) for row in self.rows)

    def _cut(self, proposal: Proposal) -> Proposal:
        """Cut a proposal after the first token that a constraint forbids. If a constraint is in
        force, this waits for the draft tokens."""
        if proposal.size == 0 or not self._bound(proposal.size + 1):
            return proposal
        drafted: Any = proposal.tokens.tolist()
        counts = [proposal.count(place) for place in range(len(drafted))]
        for place, row in enumerate(self.rows):
            if (constraint := row.distribution.constraint) is not None:
                counts[place] = constraint.verifiable(drafted[place][: counts[place]])
        made = proposal.cut(counts)
        # The masks read the tokens again. They would wait for the pass that is submitted now.
        mx.eval(made.tokens)
        return made

    def _leave_and_join(self) -> None:
        """Remove ended rows and add waiting ones, while no pass is in flight."""
        if not self._joining and (len(self.rows) == 1 or not any(row.ended for row in self.rows)):
            return
        self.watch.interrupt()
        self._leave()  # before the join, so that fewer rows are copied
        for other in self._joining:
            self.rows = self.rows + other.rows
            self.target.merge(other.target)
        self._leave()  # the first call removes nothing if all rows had ended
        self._joining = []

    def _leave(self) -> None:
        staying = [place for place, row in enumerate(self.rows) if not row.ended]
        if 0 < len(staying) < len(self.rows):
            self.rows = [self.rows[place] for place in staying]
            self.target.keep(staying)
