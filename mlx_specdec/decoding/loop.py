"""The loop: propose, verify, commit, rewind; or a plain step, pipelined. It has no clock and does
no arithmetic, and there is one blocking synchronization a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

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
from ..interfaces.results import TARGET, Cached, Cut, Reusable
from .sequence import Batch, Emission, FinishReason
from .sequence import Sequence as Decoded
from .statistics import Stopwatch

CHUNK = 512
"""Tokens in one pass over the prompt on a CPU, where larger ones take longer and more memory."""
LARGE_CHUNK = 2048
"""On an accelerator, as mlx-lm has it."""
ROOM = 4 << 30
"""Bytes that must be free for it: attention that is not fused writes 2 GB of scores for 32 heads in
half precision at 16,000 tokens."""


def chunk(prompts: int) -> int:
    """Return how many tokens of each of so many prompts one pass reads on this machine."""
    if mx.default_device() == mx.Device(mx.cpu):
        return CHUNK
    room = int(mx.device_info().get("memory_size", 0)) - mx.get_active_memory()
    return LARGE_CHUNK if room >= prompts * ROOM else CHUNK


class PromptReader:
    """Feeds a target's context the prefixes of its sequences, and a proposer what the target saw.

    target: what it was opened with is not read again. prefixes: `Model.prefix` of each prompt.
    prompts: for `Proposer.begin`. progress: counts tokens of the longest prompt. step_size: tokens
    of each in one pass; None takes `chunk`. cached: what the proposer may recall, per sequence.
    checkpoint: a length at which a chunk of the first prefix ends, if it is not cached.
    """

    def __init__(
        self,
        target: Context,
        prefixes: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        proposer: Proposer | None = None,
        progress: Progress | None = None,
        step_size: int | None = None,
        cached: Sequence[Mapping[str, Cached]] = (),
        checkpoint: int = 0,
    ) -> None:
        self._target = target
        self._cached = cached
        self._known = target.lengths
        self._prefixes = [
            prefix[seen:-1] for prefix, seen in zip(prefixes, self._known, strict=True)
        ]
        self._prompts = prompts
        self._proposer = proposer
        self._progress = progress
        self._step_size = step_size or chunk(len(prompts))
        self._read = 0
        self._checkpoint = checkpoint - self._known[0]
        self.begun = False
        self.done = False

    @property
    def left(self) -> int:
        """How many tokens of the longest prefix are still to be read."""
        return max(map(len, self._prefixes)) - self._read

    @property
    def to_cache(self) -> bool:
        return self._read == self._checkpoint if self._checkpoint > 0 else self.done

    def step(self) -> None:
        """Read one chunk and wait for it; an encoder reads its source with the first one."""
        if not self.begun:
            self.begun = True
            self._report(min(self._known))
            if self._proposer is not None:
                if any(self._known) or any(self._cached):
                    self._proposer.recall(self._known, self._cached)
                self._proposer.begin(self._prompts)
        upto = self._read + self._step_size
        if self._read < self._checkpoint:
            upto = min(upto, self._checkpoint)
        chunks = [list(prefix[self._read : upto]) for prefix in self._prefixes]
        if any(chunks):
            taps = self._proposer.taps if self._proposer is not None else ()
            scores = feed(self._target, chunks, taps)
            if self._proposer is not None:
                each = [scores.of(row, len(tokens)) for row, tokens in enumerate(chunks)]
                self._proposer.observe(chunks, each)
        self._target.evaluate()
        self._read += max(map(len, chunks))
        self.done = self._read >= max(map(len, self._prefixes))
        whole = max(map(len, self._prompts))
        self._report(whole if self.done else min(self._known) + self._read)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, in this order; the first chunk has been read."""
        self._prefixes = [self._prefixes[row] for row in keep]
        self._prompts = [self._prompts[row] for row in keep]

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(tokens, max(map(len, self._prompts)))


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
    cuts: list[Cut | None]


class Decoding:
    """Decodes a batch: call `step` until its emissions have finish reasons.

    target: a context on the prompts; the reader feeds it. watch: times the stages of each round.
    meanwhile: is called while a pass of the target is in flight, for work that nothing waits for.
    """

    def __init__(
        self,
        *,
        target: Context,
        proposer: Proposer | None,
        rule: Rule,
        batch: Batch,
        draft_length: DraftLength,
        reader: PromptReader,
        watch: Stopwatch,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._meanwhile = meanwhile
        self._rule = rule
        self._batch = batch
        self._draft_length = draft_length
        self._reader = reader
        self._watch = watch
        self._taps = proposer.taps if proposer is not None else ()
        self._in_flight: _Pass | None = None
        self._joining: list[Decoding] = []
        self._cleared = 0
        self._broken = False

    @property
    def sequences(self) -> tuple[Decoded, ...]:
        return self._batch.sequences

    def join(self, other: Decoding) -> None:
        """Append the sequences of another decoding of the same kind that has read its prompts, as
        soon as no pass is in flight; the other must not be used any more."""
        self._joining.append(other)

    @property
    def reading(self) -> bool:
        return not self._reader.done

    @property
    def to_cache(self) -> bool:
        """Whether what was read now is to be cached: at a checkpoint, or else at the end."""
        return self._reader.to_cache

    @property
    def left(self) -> int:
        """How many tokens of the longest prompt are still to be read."""
        return self._reader.left

    def step(self) -> tuple[Emission, ...]:
        """Read a part of the prompts, which emits nothing, or take one round; returns an emission
        per sequence. Before that, sequences that have ended leave, and waiting ones join.

        Raises DecodingError after a step that was interrupted: nothing can be trusted then.
        """
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        emissions = self._step()
        self._broken = False
        grown = (self._batch.longest - GROWN) // CLEAR_EVERY
        if grown != self._cleared:
            self._cleared = grown
            mx.clear_cache()
        return emissions

    def reusable(self, row: int) -> dict[str, Reusable]:
        """Return what may be cached of one of the `sequences`, by name; nothing before the first
        step, and after one that was interrupted."""
        if self._broken or not (self._reader.begun or self._reader.done):
            return {}
        memories = {} if self._proposer is None else self._proposer.reusable(row)
        return {**memories, TARGET: self._target.reusable(row)}

    def finish(self, reason: FinishReason) -> tuple[Emission, ...]:
        """End all sequences here; what was emitted stays."""
        return tuple(each.finish(reason) for each in self._batch.sequences)

    def _step(self) -> tuple[Emission, ...]:
        reading = not self._reader.done
        if self._in_flight is None and (self._reader.begun or not reading):
            self._join_and_leave()
        if reading:
            self._reader.step()
            return tuple(Emission((), ()) for _ in self._batch.sequences)
        remaining = self._batch.remaining
        if remaining == 0:
            return self.finish("length")
        proposer = self._proposer
        if proposer is None:
            return self._plain(ahead=True)
        count = self._draft_length.choose(remaining, len(self._batch.sequences))
        if count == 0:
            return self._plain(ahead=True)
        if self._in_flight is not None:
            # A draft needs the token in flight; while none is to come, the pipeline stays full.
            return self._plain(ahead=not proposer.ready(self._batch.committed, count))
        return self._speculate(proposer, count)

    def _join_and_leave(self) -> None:
        """Let waiting sequences join and ended ones leave, while nothing is in flight."""
        sequences = self._batch.sequences
        if not self._joining and (len(sequences) == 1 or not self._batch.any_ended):
            return
        parts: list[Any] = [self._batch, self._target]
        if self._proposer is not None:
            parts.append(self._proposer)
        for other in self._joining:
            theirs = [other._batch, other._target, other._proposer]
            for part, its in zip(parts, theirs, strict=False):
                part.join(its)
        self._joining = []
        staying = [row for row, each in enumerate(self._batch.sequences) if not each.ended]
        if 0 < len(staying) < len(self._batch.sequences):
            for part in parts:
                part.filter(staying)
            if self.reading:
                self._reader.filter(staying)

    def _speculate(self, proposer: Proposer, count: int) -> tuple[Emission, ...]:
        self._watch.begin(drafts=True)
        noise = self._batch.noise()
        proposal = self._batch.cut(proposer.propose(self._batch.committed, count, noise))
        self._watch.drafted(proposal)
        submitted = self._verify(proposal, noise)
        if proposal.size == 0:
            ahead = not proposer.ready(self._batch.committed, count)
            return self._finish_plain(submitted, ahead)
        return self._commit(submitted)

    def _plain(self, ahead: bool) -> tuple[Emission, ...]:
        self._watch.begin(drafts=False)
        step = self._in_flight
        if step is None:
            step = self._verify(no_proposal(len(self._batch.sequences)), self._batch.noise())
        return self._finish_plain(step, ahead)

    def _finish_plain(self, step: _Pass, ahead: bool) -> tuple[Emission, ...]:
        """Read a plain step; `ahead` submits the next one before, so that the device has work."""
        self._in_flight = None
        batch = self._batch
        waits = batch.constrained or self._joining or batch.any_ended
        if ahead and batch.remaining > 1 and not waits:
            chosen = step.verdict.next[:, None]
            self._in_flight = self._verify(step.proposal, batch.noise(1), chosen)
        return self._commit(step)

    def _verify(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
        """Submit a pass over the proposal behind `chosen`, (batch, 1): tokens that have not been
        read yet, or by default the newest committed ones, which the target has not seen."""
        newest = self._batch.newest() if chosen is None else chosen
        tokens = mx.concatenate([newest, proposal.tokens], axis=1) if proposal.size else newest
        scores = self._target.advance(tokens, proposed=proposal.size, taps=self._taps)
        self._watch.advanced(scores)
        following = proposal.tokens if chosen is None else chosen
        rows, log_p = self._batch.log_probabilities(scores.logits, following)
        verdict = self._rule.verify(log_p, proposal.for_rules(), noise)
        mx.async_eval(verdict.next, verdict.accepted)
        if self._meanwhile is not None:
            self._meanwhile()
        return _Pass(proposal, scores, verdict, self._batch.cuts(rows, verdict, noise))

    def _commit(self, done: _Pass) -> tuple[Emission, ...]:
        """Wait for the verdict, commit the accepted tokens and rewind the rest."""
        emissions, rounds = self._batch.commit(done.proposal, done.verdict, done.cuts)
        emissions = self._batch.with_logprobs(emissions, done.scores.logits)
        ended = all(emission.finish_reason is not None for emission in emissions)
        if not ended:
            if done.proposal.size:
                self._target.rewind(tuple([len(each.committed) - 1 for each in rounds]))
            if self._proposer is not None:
                seen = [each.committed[-each.accepted - 2 : -1] for each in rounds]
                scores = [done.scores.of(row, len(tokens)) for row, tokens in enumerate(seen)]
                self._proposer.observe(seen, scores)
        pipelined = self._in_flight is not None
        self._watch.finish(done.proposal, rounds, pipelined=pipelined, ended=ended)
        return emissions
