"""The decoding loop: prefill, then rounds of propose, verify, commit and rewind, or pipelined plain
decoding steps. A round does no arithmetic of its own and blocks on the device only once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..checkpoints import disk
from ..draft_length.length import DraftLength
from ..errors import DecodingError
from ..interfaces import (
    Context,
    Noise,
    Progress,
    Proposal,
    Proposer,
    Rule,
    Scores,
    Verdict,
    feed,
    no_proposal,
)
from ..interfaces.records import Step
from ..interfaces.results import TARGET, Cached, Reusable
from .sequence import Batch
from .sequence import Sequence as Decoded
from .statistics import Stopwatch

CHUNK = 512
"""Prefill chunk on a CPU, in tokens. Larger chunks are slower there and need more memory."""
LARGE_CHUNK = 2048
"""Prefill chunk on an accelerator with fused attention, in tokens; the value of mlx-lm."""
ROOM = 4 << 30
"""Free memory per prompt, in bytes, that LARGE_CHUNK requires. Should MLX not fuse attention, 32
heads at 16,000 tokens need 2 GB for the scores in half precision."""


def chunk(prompts: int, *, holds_scores: bool) -> int:
    """Return the prefill chunk on this machine, in tokens per prompt, for a number of prompts.
    holds_scores: See `models.base.Base.holds_scores`."""
    if holds_scores or mx.default_device() == mx.Device(mx.cpu):
        return CHUNK
    free = disk.usable_memory() - mx.get_active_memory()
    return LARGE_CHUNK if free >= prompts * ROOM else CHUNK


@dataclass(eq=False)
class PromptReader:
    """The prefill of a target's context and of its proposer, one chunk at a time.

    Attributes:
        target: A context, which may already hold cached tokens.
        prefixes: `Model.prefix` of each prompt.
        prompts: The prompts, for `Proposer.begin`.
        proposer: Receives the target's results for every chunk.
        progress: Receives the tokens done and the length of the longest prompt.
        step_size: Tokens per sequence and pass; see `chunk`.
        cached: State for `Proposer.recall`, per sequence.
        checkpoint: Length of the first prefix at which a chunk must end; 0 means none.
        score: If a caller wants the log-probabilities of the only prompt, a function that receives
            the logits of a chunk, (rows, width), and the token after each row, and waits for them.
        drafting: Seconds on the `clock` that the proposer took."""

    target: Context
    prefixes: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    proposer: Proposer | None = None
    progress: Progress | None = None
    step_size: int = CHUNK
    cached: Sequence[Mapping[str, Cached]] = ()
    checkpoint: int = 0
    score: Callable[[mx.array, Sequence[int]], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    drafting: float = field(default=0.0, init=False)
    begun: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._cached_lengths = self.target.lengths
        self._left = [
            prefix[length:-1]
            for prefix, length in zip(self.prefixes, self._cached_lengths, strict=True)
        ]
        self._read = 0
        self._checkpoint = self.checkpoint - self._cached_lengths[0]

    @property
    def left(self) -> int:
        """How many tokens of the longest prefix are not prefilled yet."""
        return max(map(len, self._left)) - self._read

    @property
    def to_cache(self) -> bool:
        """Whether to cache the state now: at the checkpoint, or at the end if there is none."""
        return self._read == self._checkpoint if self._checkpoint > 0 else self.done

    def step(self) -> None:
        """Prefill one chunk and wait for it. An encoder runs with the first chunk."""
        if not self.begun:
            self.begun = True
            self._report(min(self._cached_lengths))
            if self.proposer is not None:
                if any(self._cached_lengths) or any(self.cached):
                    self.proposer.recall(self._cached_lengths, self.cached)
                self._timed(lambda proposer: proposer.begin(self.prompts))
        upto = self._read + self.step_size
        if self._read < self._checkpoint:
            upto = min(upto, self._checkpoint)
        chunks = [list(prefix[self._read : upto]) for prefix in self._left]
        row_scores: list[Scores] = []
        if any(chunks):
            taps = self.proposer.taps if self.proposer is not None else ()
            scores = feed(self.target, chunks, taps)
            row_scores = [scores.of(row, len(tokens)) for row, tokens in enumerate(chunks)]
            if self.score is not None:
                first = self._cached_lengths[0] + self._read + 1
                self.score(scores.logits[0], self.prefixes[0][first : first + len(chunks[0])])
        self.target.evaluate()
        if row_scores:
            self._timed(lambda proposer: proposer.observe(chunks, row_scores))
        self._read += max(map(len, chunks))
        self.done = self._read >= max(map(len, self._left))
        longest = max(map(len, self.prompts))
        self._report(longest if self.done else min(self._cached_lengths) + self._read)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order. The first chunk must have been prefilled."""
        self._left = [self._left[row] for row in keep]
        self.prompts = [self.prompts[row] for row in keep]

    def _timed(self, call: Callable[[Proposer], object]) -> None:
        if self.proposer is not None:
            began = self.clock()
            call(self.proposer)
            self.drafting += self.clock() - began

    def _report(self, tokens: int) -> None:
        if self.progress is not None:
            self.progress(tokens, max(map(len, self.prompts)))


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
class Decoding:
    """The decoding of a batch. Call `step` until every sequence has a finish reason.

    Attributes:
        target: The target's context, which `reader` prefills.
        proposer: The source of draft tokens; None means plain decoding.
        watch: Times the stages of each round.
        delta: The lenience of the rule."""

    target: Context
    proposer: Proposer | None
    rule: Rule
    batch: Batch
    draft_length: DraftLength
    reader: PromptReader
    watch: Stopwatch
    delta: float = 0.0
    _in_flight: _Pass | None = field(default=None, init=False)
    _joining: list[Decoding] = field(default_factory=list, init=False)
    _cleared: int = field(default=0, init=False)
    _broken: bool = field(default=False, init=False)

    @property
    def sequences(self) -> tuple[Decoded, ...]:
        return self.batch.sequences

    def join(self, other: Decoding) -> None:
        """Append the sequences of another decoding of the same kind, as soon as no pass is in
        flight. The other decoding has finished its prefill and must not be used afterwards."""
        self._joining.append(other)

    def reusable(self, row: int) -> dict[str, Reusable]:
        """Return the cacheable state of one of the `sequences`, by name. It is empty before the
        first step and after an interrupted step."""
        if self._broken or not (self.reader.begun or self.reader.done):
            return {}
        states = {} if self.proposer is None else self.proposer.reusable(row)
        return {**states, TARGET: self.target.reusable(row)}

    def step(self) -> tuple[Step, ...]:
        """Remove ended sequences, add waiting ones, then prefill one chunk or run one round.

        Returns one step per sequence, which is empty in a prefill. Raises DecodingError if an
        exception interrupted an earlier step, which leaves the state inconsistent."""
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        if self._in_flight is None and (self.reader.begun or self.reader.done):
            self._leave_and_join()
        if not self.reader.done:
            self.reader.step()
            steps = tuple(Step() for _ in self.batch.sequences)
        elif remaining := self.batch.remaining:
            steps = self._round(remaining)
        else:
            steps = tuple(sequence.finish("length") for sequence in self.batch.sequences)
        self._broken = False
        self._free_buffers()
        return steps

    def _round(self, remaining: int) -> tuple[Step, ...]:
        """Propose, submit a target pass, and commit the accepted tokens."""
        batch, proposer, rows = self.batch, self.proposer, len(self.batch.sequences)
        count = 0 if proposer is None else self.draft_length.choose(remaining, rows)
        current, self._in_flight = self._in_flight, None
        self.watch.begin(drafts=count > 0 and current is None)
        if current is None:
            noise, proposal = batch.noise(), no_proposal(rows)
            if proposer is not None and count > 0:
                proposal = batch.cut(proposer.propose(batch.committed, count, noise))
                self.watch.drafted(proposal)
            current = self._submit(proposal, noise)
        ahead = current.proposal.size == 0 and remaining > 1
        # If a constraint binds the token after the next one, its mask depends on the next one.
        ahead = ahead and not (batch.bound(2) or self._joining or batch.any_ended)
        if ahead and proposer is not None and count > 0:
            # A draft starts from the token of this step. Without a draft, the pipeline stays full.
            ahead = not proposer.ready(batch.committed, count)
        if ahead:
            chosen = current.verdict.next[:, None]
            self._in_flight = self._submit(current.proposal, batch.noise(1), chosen)
        return self._commit(current)

    def _submit(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
        """Submit a target pass over one token per sequence and the proposal after it. That token is
        `chosen`, (batch, 1) int32, of the previous pass, or by default the newest committed one,
        which is not in the KV cache yet."""
        newest = self.batch.newest() if chosen is None else chosen
        tokens = mx.concatenate([newest, proposal.tokens], axis=1) if proposal.size else newest
        taps = () if self.proposer is None else self.proposer.taps
        scores = self.target.advance(tokens, proposed=proposal.size, taps=taps)
        self.watch.advanced(scores)
        following = proposal.tokens if chosen is None else chosen
        log_p = self.batch.log_probabilities(scores.logits, following)
        verdict = self.rule(log_p, proposal.for_rules(), noise, self.delta)
        mx.async_eval(verdict.next, verdict.accepted)
        # The host does this work while the pass is in flight.
        self.batch.draw_ahead()
        return _Pass(proposal, scores, verdict)

    def _commit(self, done: _Pass) -> tuple[Step, ...]:
        """Wait for the verdict, commit the accepted tokens and rewind the rejected ones."""
        steps, rounds = self.batch.commit(done.proposal, done.verdict)
        steps = self.batch.with_logprobs(steps, done.scores.logits)
        ended = all(step.finish_reason is not None for step in steps)
        if not ended:
            if done.proposal.size:
                lengths = tuple([len(row.committed) - 1 for row in rounds])
                self.target.rewind(lengths)
            if self.proposer is not None:
                verified = [row.committed[-row.accepted - 2 : -1] for row in rounds]
                scores = [done.scores.of(row, len(tokens)) for row, tokens in enumerate(verified)]
                self.proposer.observe(verified, scores)
        pipelined = self._in_flight is not None
        self.watch.finish(done.proposal, rounds, pipelined=pipelined, ended=ended)
        return steps

    def _leave_and_join(self) -> None:
        """Remove ended sequences and add waiting ones, while no pass is in flight."""
        if not self._joining and (len(self.batch.sequences) == 1 or not self.batch.any_ended):
            return
        self._leave()  # before the join, so that fewer rows are copied
        for other in self._joining:
            self.batch.join(other.batch)
            self.target.join(other.target)
            if self.proposer is not None and other.proposer is not None:
                self.proposer.join(other.proposer)
        self._leave()  # the first call removes nothing if all sequences had ended
        self._joining = []

    def _leave(self) -> None:
        sequences = self.batch.sequences
        staying = [row for row, sequence in enumerate(sequences) if not sequence.ended]
        if 0 < len(staying) < len(sequences):
            self.batch.filter(staying)
            self.target.filter(staying)
            if self.proposer is not None:
                self.proposer.filter(staying)
            if not self.reader.done:
                self.reader.filter(staying)

    def _free_buffers(self) -> None:
        grown = (max(map(len, self.batch.committed)) - GROWN) // CLEAR_EVERY
        if grown != self._cleared:
            self._cleared = grown
            mx.clear_cache()
