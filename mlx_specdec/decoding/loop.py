"""The loop: propose, verify, commit, rewind; or a plain step, pipelined. It has no clock and does
no arithmetic, and there is one blocking synchronization a round."""

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
from ..interfaces.results import TARGET, Cached, Reusable
from .sequence import Batch, Emission
from .sequence import Sequence as Decoded
from .statistics import Stopwatch

CHUNK = 512
"""Tokens in one pass over the prompt on a CPU, where larger ones take longer and more memory."""
LARGE_CHUNK = 2048
"""Tokens in one pass over the prompt on an accelerator, as in mlx-lm, if attention is fused."""
ROOM = 4 << 30
"""Bytes that must be free for each prompt in such a pass. If MLX did not fuse attention after all,
32 heads would write 2 GB of scores in half precision at 16,000 tokens."""


def chunk(prompts: int, *, holds_scores: bool) -> int:
    """Return how many tokens of each of so many prompts one pass reads on this machine.
    holds_scores: as `models.base.Base` says of the model."""
    if holds_scores or mx.default_device() == mx.Device(mx.cpu):
        return CHUNK
    room = disk.usable_memory() - mx.get_active_memory()
    return LARGE_CHUNK if room >= prompts * ROOM else CHUNK


@dataclass(eq=False)
class PromptReader:
    """Feeds a target's context the prefixes of its sequences, and a proposer what the target saw.
    target: what it was opened with is not read again. prefixes: `Model.prefix` of each prompt.
    prompts: for `Proposer.begin`. progress: counts tokens of the longest prompt. step_size: tokens
    of each in one pass; see `chunk`. cached: what the proposer may recall, per sequence.
    checkpoint: a length at which a chunk of the first prefix ends, if it is not cached.
    drafting: seconds on the `clock` that the proposer has taken to read."""

    target: Context
    prefixes: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    proposer: Proposer | None = None
    progress: Progress | None = None
    step_size: int = CHUNK
    cached: Sequence[Mapping[str, Cached]] = ()
    checkpoint: int = 0
    clock: Callable[[], float] = time.perf_counter
    drafting: float = field(default=0.0, init=False)
    begun: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._known = self.target.lengths
        self._left = [
            prefix[seen:-1] for prefix, seen in zip(self.prefixes, self._known, strict=True)
        ]
        self._read = 0
        self._checkpoint = self.checkpoint - self._known[0]

    @property
    def left(self) -> int:
        """How many tokens of the longest prefix are still to be read."""
        return max(map(len, self._left)) - self._read

    @property
    def to_cache(self) -> bool:
        """Whether what was read now is to be cached: at a checkpoint, or else at the end."""
        return self._read == self._checkpoint if self._checkpoint > 0 else self.done

    def step(self) -> None:
        """Read one chunk and wait for it; an encoder reads its source with the first one."""
        if not self.begun:
            self.begun = True
            self._report(min(self._known))
            if self.proposer is not None:
                if any(self._known) or any(self.cached):
                    self.proposer.recall(self._known, self.cached)
                self._timed(lambda its: its.begin(self.prompts))
        upto = self._read + self.step_size
        if self._read < self._checkpoint:
            upto = min(upto, self._checkpoint)
        chunks = [list(prefix[self._read : upto]) for prefix in self._left]
        each: list[Scores] = []
        if any(chunks):
            taps = self.proposer.taps if self.proposer is not None else ()
            scores = feed(self.target, chunks, taps)
            each = [scores.of(row, len(tokens)) for row, tokens in enumerate(chunks)]
        self.target.evaluate()
        if each:
            self._timed(lambda its: its.observe(chunks, each))
        self._read += max(map(len, chunks))
        self.done = self._read >= max(map(len, self._left))
        whole = max(map(len, self.prompts))
        self._report(whole if self.done else min(self._known) + self._read)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, in this order; the first chunk has been read."""
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
"""Tokens of a text after which MLX frees the buffers that it holds for reuse: growing caches leave
buffers of sizes that nothing needs again."""
GROWN = 2
"""Tokens after a multiple of CLEAR_EVERY: caches grew in the pass over the first of them."""


@dataclass(frozen=True)
class _Pass:
    """A submitted pass of the target, whose verdict has not been read."""

    proposal: Proposal
    scores: Scores
    verdict: Verdict


@dataclass(eq=False, kw_only=True)
class Decoding:
    """Decodes a batch: call `step` until its emissions have finish reasons. target: a context on
    the prompts; the reader feeds it. watch: times the stages of each round."""

    target: Context
    proposer: Proposer | None
    rule: Rule
    batch: Batch
    draft_length: DraftLength
    reader: PromptReader
    watch: Stopwatch
    _in_flight: _Pass | None = field(default=None, init=False)
    _joining: list[Decoding] = field(default_factory=list, init=False)
    _cleared: int = field(default=0, init=False)
    _broken: bool = field(default=False, init=False)

    @property
    def sequences(self) -> tuple[Decoded, ...]:
        return self.batch.sequences

    def join(self, other: Decoding) -> None:
        """Append the sequences of another decoding of the same kind that has read its prompts, as
        soon as no pass is in flight; the other must not be used any more."""
        self._joining.append(other)

    def reusable(self, row: int) -> dict[str, Reusable]:
        """Return what may be cached of one of the `sequences`, by name; nothing before the first
        step, and after one that was interrupted."""
        if self._broken or not (self.reader.begun or self.reader.done):
            return {}
        memories = {} if self.proposer is None else self.proposer.reusable(row)
        return {**memories, TARGET: self.target.reusable(row)}

    def step(self) -> tuple[Emission, ...]:
        """Read a part of the prompts, which emits nothing, or take one round; return an emission
        per sequence. Before that, sequences that have ended leave, and waiting ones join. Raises
        DecodingError after a step that was interrupted: nothing can be trusted then."""
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        if self._in_flight is None and (self.reader.begun or self.reader.done):
            self._leave_and_join()
        if not self.reader.done:
            self.reader.step()
            emissions = tuple(Emission((), ()) for _ in self.batch.sequences)
        elif remaining := self.batch.remaining:
            emissions = self._round(remaining)
        else:
            emissions = tuple(sequence.finish("length") for sequence in self.batch.sequences)
        self._broken = False
        self._free_buffers()
        return emissions

    def _round(self, remaining: int) -> tuple[Emission, ...]:
        """Propose, submit a pass, and commit what the rule accepts."""
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
        ahead = ahead and not (batch.constrained or self._joining or batch.any_ended)
        if ahead and proposer is not None and count > 0:
            # A draft needs the token of this step. If none is to come, the pipeline stays full.
            ahead = not proposer.ready(batch.committed, count)
        if ahead:
            chosen = current.verdict.next[:, None]
            self._in_flight = self._submit(current.proposal, batch.noise(1), chosen)
        return self._commit(current)

    def _submit(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
        """Submit a pass over the proposal behind `chosen`, (batch, 1): tokens that have not been
        read yet, or by default the newest committed ones, which the target has not seen."""
        newest = self.batch.newest() if chosen is None else chosen
        tokens = mx.concatenate([newest, proposal.tokens], axis=1) if proposal.size else newest
        taps = () if self.proposer is None else self.proposer.taps
        scores = self.target.advance(tokens, proposed=proposal.size, taps=taps)
        self.watch.advanced(scores)
        following = proposal.tokens if chosen is None else chosen
        log_p = self.batch.log_probabilities(scores.logits, following)
        verdict = self.rule.verify(log_p, proposal.for_rules(), noise)
        mx.async_eval(verdict.next, verdict.accepted)
        # Work that nothing waits for, while the pass is in flight.
        self.batch.draw_ahead()
        self.draft_length.meanwhile()
        return _Pass(proposal, scores, verdict)

    def _commit(self, done: _Pass) -> tuple[Emission, ...]:
        """Wait for the verdict, commit the accepted tokens and rewind the rest."""
        emissions, rounds = self.batch.commit(done.proposal, done.verdict)
        emissions = self.batch.with_logprobs(emissions, done.scores.logits)
        ended = all(emission.finish_reason is not None for emission in emissions)
        if not ended:
            if done.proposal.size:
                kept = tuple([len(row.committed) - 1 for row in rounds])
                self.watch.rewound(self.target.rewind(kept))
            if self.proposer is not None:
                seen = [row.committed[-row.accepted - 2 : -1] for row in rounds]
                scores = [done.scores.of(row, len(tokens)) for row, tokens in enumerate(seen)]
                self.proposer.observe(seen, scores)
        pipelined = self._in_flight is not None
        self.watch.finish(done.proposal, rounds, pipelined=pipelined, ended=ended)
        return emissions

    def _leave_and_join(self) -> None:
        """Let ended sequences leave and waiting ones join, while nothing is in flight."""
        if not self._joining and (len(self.batch.sequences) == 1 or not self.batch.any_ended):
            return
        self._leave()  # before others join, so that fewer rows are copied
        for other in self._joining:
            self.batch.join(other.batch)
            self.target.join(other.target)
            if self.proposer is not None and other.proposer is not None:
                self.proposer.join(other.proposer)
        self._leave()  # again if all had ended
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
