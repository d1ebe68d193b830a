"""The heartbeat: propose, verify, commit, rewind; or a plain step, pipelined.

It owns only the arrows between what it is handed: it knows no model, no proposer and no rule by
name, has no clock and does no arithmetic. One blocking synchronisation a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..draft_length.length import DraftLength
from ..errors import DecodingError
from ..interfaces import Context, Noise, Proposal, Proposer, Rule, Scores, Verdict, no_proposal
from ..interfaces.reusable import TARGET, Memory
from ..interfaces.rounds import Cut
from .prompt import PromptReader
from .sequence import Batch, Sequence
from .stop_criteria import Emission, FinishReason
from .stopwatch import Stopwatch

CLEAR_EVERY = 256
"""Tokens of a text after which MLX gives back the buffers that it keeps for reuse: caches that grow
leave sizes behind that nothing asks for again."""
GROWN = 2
"""Tokens behind a multiple of CLEAR_EVERY: caches grew in the pass over the first of them."""


@dataclass(frozen=True)
class _Pass:
    """A pass of the target that was submitted and whose verdict was not yet read."""

    proposal: Proposal
    scores: Scores
    verdict: Verdict
    cuts: list[Cut | None]


class Decoding:
    """A batch in the making; `step` until its emissions have finish reasons.

    target: a context on the prompt that has seen nothing; the reader feeds it. watch: hears of
    every stage of a round.
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
    ) -> None:
        self._target = target
        self._proposer = proposer
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
    def sequences(self) -> tuple[Sequence, ...]:
        """Whose emissions the last step gave, in their order."""
        return self._batch.sequences

    def join(self, other: Decoding) -> None:
        """Take the sequences of another decoding that has read its prompts behind the own ones, as
        soon as no pass is in flight; the other is used up. Both targets are of one model and take
        others in, and so do both proposers."""
        self._joining.append(other)

    @property
    def joins(self) -> bool:
        """Whether others are about to join."""
        return bool(self._joining)

    @property
    def reading(self) -> bool:
        """Whether the next step reads a part of the prompt."""
        return not self._reader.done

    @property
    def left(self) -> int:
        """Tokens of the longest prompt that are still to be read."""
        return self._reader.left

    def step(self) -> tuple[Emission, ...]:
        """A part of the prompt, which emits nothing, or one round; an emission per sequence.

        Before it, sequences that have ended leave, and those that were to join do.

        Raises DecodingError after a step that was interrupted: nothing can be trusted then.
        """
        if self._broken:
            raise DecodingError("a step was interrupted in its middle: start the text again")
        self._broken = True
        emissions = self._step()
        self._broken = False
        self._give_back()
        return emissions

    def _give_back(self) -> None:
        """MLX's spare buffers, as soon as caches have grown."""
        due = (self._batch.longest - GROWN) // CLEAR_EVERY
        if due != self._cleared:
            self._cleared = due
            mx.clear_cache()

    def memories(self, row: int) -> dict[str, Memory]:
        """What may be kept of one of the `sequences`, by name; nothing before the first step, and
        after one that was interrupted."""
        if self._broken or not (self._reader.begun or self._reader.done):
            return {}
        own = {TARGET: self._target.memory(row)}
        return own if self._proposer is None else {**self._proposer.memories(row), **own}

    def finish(self, reason: FinishReason) -> tuple[Emission, ...]:
        """End all sequences here; what was emitted stays."""
        return tuple(each.finish(reason) for each in self._batch.sequences)

    def _step(self) -> tuple[Emission, ...]:
        reading = self.reading
        if self._in_flight is None and (self._reader.begun or not reading):
            self._change()
        if reading:
            self._reader.step()
            return tuple(Emission((), ()) for _ in self._batch.sequences)
        if self._batch.remaining == 0:
            return self.finish("length")
        rows = len(self.sequences)
        count = self._draft_length.choose(self._batch.remaining, rows) if self._proposer else 0
        if self._proposer is None or count == 0:
            return self._plain(ahead=True)
        if self._in_flight is not None:
            # A draft needs the token in flight; while none is to come, the pipeline stays full.
            return self._plain(ahead=not self._proposer.ready(self._batch.committed, count))
        return self._speculate(self._proposer, count)

    def _change(self) -> None:
        """Sequences leave and join; nothing is in flight."""
        for other in self._joining:
            for own, its in zip(self._parts(), other._parts(), strict=True):
                own.join(its)
        self._joining = []
        keep = [row for row, each in enumerate(self.sequences) if not each.ended]
        if 0 < len(keep) < len(self.sequences):
            for each in self._parts():
                each.filter(keep)
            if self.reading:
                self._reader.filter(keep)

    def _parts(self) -> list[Any]:
        parts = [self._batch, self._target]
        return parts if self._proposer is None else [*parts, self._proposer]

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
        nothing = no_proposal(len(self._batch.sequences))
        step = self._in_flight or self._verify(nothing, self._batch.noise())
        return self._finish_plain(step, ahead)

    def _finish_plain(self, step: _Pass, ahead: bool) -> tuple[Emission, ...]:
        """Read a plain step; `ahead` submits the next one before, so that the device has work."""
        self._in_flight = None
        changes = self._joining or any(each.ended for each in self.sequences)
        waits = changes or self._batch.constrained
        if ahead and self._batch.remaining > 1 and not waits:
            chosen = step.verdict.next[:, None]
            self._in_flight = self._verify(step.proposal, self._batch.noise(1), chosen)
        return self._commit(step)

    def _verify(self, proposal: Proposal, noise: Noise, chosen: mx.array | None = None) -> _Pass:
        """Submit a pass over the proposal behind `chosen`, (batch, 1): what the target has not
        seen, by default the newest committed tokens, else tokens that are not read yet."""
        newest = self._batch.newest() if chosen is None else chosen
        tokens = mx.concatenate([newest, proposal.tokens], axis=1) if proposal.size else newest
        scores = self._target.advance(tokens, proposed=proposal.size, taps=self._taps)
        self._watch.advanced(scores)
        following = proposal.tokens if chosen is None else chosen
        rows = self._batch.before_filters(scores.logits, following)
        log_p = self._batch.apply_filters(rows, following)
        verdict = self._rule.verify(log_p, proposal.for_rules(), noise)
        mx.async_eval(verdict.next, verdict.kept)
        return _Pass(proposal, scores, verdict, self._batch.cuts(rows, verdict, noise))

    def _commit(self, done: _Pass) -> tuple[Emission, ...]:
        """Wait for the verdict; what it kept is committed and the rest taken back."""
        emissions, rounds = self._batch.commit(done.proposal, done.verdict, done.cuts)
        emissions = self._batch.with_logprobs(emissions, done.scores.logits)
        ended = all(emission.finish_reason is not None for emission in emissions)
        if not ended:
            if done.proposal.size:
                self._target.rewind(tuple(len(each.committed) - 1 for each in rounds))
            if self._proposer is not None:
                kept = [each.committed[-each.accepted - 2 : -1] for each in rounds]
                scores = [done.scores.of(row, len(tokens)) for row, tokens in enumerate(kept)]
                self._proposer.observe(kept, scores)
        pipelined = self._in_flight is not None
        self._watch.finish(done.proposal, rounds, pipelined=pipelined, ended=ended)
        return emissions
