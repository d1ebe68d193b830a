"""The loop: propose, verify, commit, rewind; or a plain step, pipelined. It has no clock and does
no arithmetic, and there is one blocking synchronization a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    the prompts; the reader feeds it. watch: times the stages of each round. meanwhile: is called
    while a pass of the target is in flight, for work that nothing waits for."""

    target: Context
    proposer: Proposer | None
    rule: Rule
    batch: Batch
    draft_length: DraftLength
    reader: PromptReader
    watch: Stopwatch
    meanwhile: Callable[[], None] | None = None
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

    def step(self) -> tuple[Emission, ...]:
        """Read a part of the prompts, which emits nothing, or take one round; returns an emission
        per sequence. Before that, sequences that have ended leave, and waiting ones join. Raises
        DecodingError after a step that was interrupted: nothing can be trusted then."""
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        emissions = self._step()
        self._broken = False
        grown = (max(map(len, self.batch.committed)) - GROWN) // CLEAR_EVERY
        if grown != self._cleared:
            self._cleared = grown
            mx.clear_cache()
        return emissions

    def reusable(self, row: int) -> dict[str, Reusable]:
        """Return what may be cached of one of the `sequences`, by name; nothing before the first
        step, and after one that was interrupted."""
        if self._broken or not (self.reader.begun or self.reader.done):
            return {}
        memories = {} if self.proposer is None else self.proposer.reusable(row)
        return {**memories, TARGET: self.target.reusable(row)}

    def _step(self) -> tuple[Emission, ...]:
        if self._in_flight is None and (self.reader.begun or self.reader.done):
            self._join_and_leave()
        if not self.reader.done:
            self.reader.step()
            return tuple(Emission((), ()) for _ in self.batch.sequences)
        remaining = self.batch.remaining
        if remaining == 0:
            return tuple(each.finish("length") for each in self.batch.sequences)
        proposer = self.proposer
        if proposer is None:
            return self._plain(ahead=True)
        count = self.draft_length.choose(remaining, len(self.batch.sequences))
        if count == 0:
            return self._plain(ahead=True)
        if self._in_flight is not None:
            # A draft needs the token in flight; while none is to come, the pipeline stays full.
            return self._plain(ahead=not proposer.ready(self.batch.committed, count))
        return self._speculate(proposer, count)

    def _join_and_leave(self) -> None:
        """Let waiting sequences join and ended ones leave, while nothing is in flight."""
        sequences = self.batch.sequences
        if not self._joining and (len(sequences) == 1 or not self.batch.any_ended):
            return
        whole = (self.batch, self.target, self.proposer)
        parts: list[Any] = [part for part in whole if part is not None]
        self._leave(parts)  # before others join, so that fewer rows are copied
        for other in self._joining:
            for part, its in zip(parts, (other.batch, other.target, other.proposer), strict=False):
                part.join(its)
        self._leave(parts)  # again where all had ended
        self._joining = []

    def _leave(self, parts: Sequence[Any]) -> None:
        staying = [row for row, each in enumerate(self.batch.sequences) if not each.ended]
        if 0 < len(staying) < len(self.batch.sequences):
            for part in parts:
                part.filter(staying)
            if not self.reader.done:
                self.reader.filter(staying)

    def _speculate(self, proposer: Proposer, count: int) -> tuple[Emission, ...]:
        self.watch.begin(drafts=True)
        noise = self.batch.noise()
        proposal = self.batch.cut(proposer.propose(self.batch.committed, count, noise))
        self.watch.drafted(proposal)
        submitted = self._verify(proposal, noise)
        if proposal.size == 0:
            ahead = not proposer.ready(self.batch.committed, count)
            return self._finish_plain(submitted, ahead)
        return self._commit(submitted)

    def _plain(self, ahead: bool) -> tuple[Emission, ...]:
        self.watch.begin(drafts=False)
        step = self._in_flight or self._verify(
            no_proposal(len(self.batch.sequences)), self.batch.noise()
        )
        return self._finish_plain(step, ahead)

    def _finish_plain(self, step: _Pass, ahead: bool) -> tuple[Emission, ...]:
        """Read a plain step; `ahead` submits the next one before, so that the device has work."""
        self._in_flight = None
        batch = self.batch
        waits = batch.constrained or self._joining or batch.any_ended
        if ahead and batch.remaining > 1 and not waits:
            chosen = step.verdict.next[:, None]
            self._in_flight = self._verify(step.proposal, batch.noise(1), chosen)
        return self._commit(step)

    def _verify(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
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
        self.batch.draw_ahead()
        if self.meanwhile is not None:
            self.meanwhile()
        return _Pass(proposal, scores, verdict)

    def _commit(self, done: _Pass) -> tuple[Emission, ...]:
        """Wait for the verdict, commit the accepted tokens and rewind the rest."""
        emissions, rounds = self.batch.commit(done.proposal, done.verdict)
        emissions = self.batch.with_logprobs(emissions, done.scores.logits)
        ended = all(emission.finish_reason is not None for emission in emissions)
        if not ended:
            if done.proposal.size:
                kept = tuple([len(each.committed) - 1 for each in rounds])
                self.watch.rewound(self.target.rewind(kept))
            if self.proposer is not None:
                seen = [each.committed[-each.accepted - 2 : -1] for each in rounds]
                scores = [done.scores.of(row, len(tokens)) for row, tokens in enumerate(seen)]
                self.proposer.observe(seen, scores)
        pipelined = self._in_flight is not None
        self.watch.finish(done.proposal, rounds, pipelined=pipelined, ended=ended)
        return emissions
