"""The heartbeat: propose, verify, commit, rewind; or a plain step, pipelined.

Knows the three interfaces and owns only the arrows between them. Knows no model, no proposer and
no rule by name. One blocking synchronisation a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..contracts import Context, NoiseSource, Proposal, Proposer, Round, Rule, Scores, Verdict
from ..sampling.law import Law, last_rows
from .draft_length import DraftLength
from .ending import Emission, Ending
from .margins import Margins
from .statistics import Recorder, RoundTimes

Check = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class _Pending:
    """A plain step that was submitted and not yet read."""

    scores: Scores
    verdict: Verdict


class Decoding:
    """One text in the making; `step` until an emission has a finish reason.

    committed: `Model.prefix` of the prompt. target: the context opened on the same prompt.
    prompt: what `Proposer.begin` is told; the source text of an encoder-decoder model.
    check: called with the committed tokens after every round, to find mistakes.
    """

    def __init__(
        self,
        *,
        target: Context,
        proposer: Proposer | None,
        rule: Rule,
        law: Law,
        noise: NoiseSource,
        draft_length: DraftLength,
        ending: Ending,
        recorder: Recorder,
        committed: Sequence[int],
        prompt: Sequence[int],
        check: Check | None = None,
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._rule = rule
        self._law = law
        self._noise = noise
        self._draft_length = draft_length
        self._ending = ending
        self._recorder = recorder
        self._check = check
        self._margins = Margins(recorder.add_margins)
        self._committed = list(committed)
        self._prompt_length = len(committed)
        self._nothing = Proposal(mx.zeros((1, 0), dtype=mx.int32))
        self._round = 0
        self._pending: _Pending | None = None
        self._abstained = False
        self._taps = proposer.taps if proposer is not None else ()
        if proposer is not None:
            self._begin(proposer, prompt)

    @property
    def committed(self) -> Sequence[int]:
        """The prefix and everything decided so far; the emitted text may have ended earlier."""
        return tuple(self._committed)

    def step(self) -> Emission:
        """One round. Emits at least one token, unless there is no room for any."""
        if self._ending.room == 0:
            return self._ending.finish("length")
        count = self._draft_length.choose(self._ending.room) if self._proposer else 0
        if self._proposer is None or count == 0:
            return self._plain(ahead=True)
        if self._pending is not None:
            return self._drain(self._proposer, count)
        return self._speculate(self._proposer, count)

    def interrupt(self) -> Emission:
        """End here; what was emitted stays."""
        return self._ending.finish("interrupted")

    def finish(self) -> None:
        """Wait for figures that no token had to wait for; once, after the last emission."""
        self._margins.flush()

    def _begin(self, proposer: Proposer, prompt: Sequence[int]) -> None:
        if not self._taps:
            proposer.begin(prompt, None)
            return
        self._pending = self._submit(self._unseen(), None)
        proposer.begin(prompt, self._pending.scores)

    def _plain(self, ahead: bool) -> Emission:
        started = self._recorder.clock()
        pending = self._pending or self._submit(self._unseen(), None)
        self._pending = None
        if ahead and self._ending.room > 1:
            following = pending.verdict.next[None]
            self._pending = self._submit(following, following)
        token = _read(pending.verdict.next)[0]
        emission = self._commit([token], self._nothing, pending)
        seconds = self._recorder.clock() - started
        self._recorder.add_plain(len(emission.tokens), seconds)
        if ahead:
            self._draft_length.observe(0, 0, seconds)
        return emission

    def _drain(self, proposer: Proposer, count: int) -> Emission:
        """Read the step in flight. One that abstained last time is asked first, and stays in plain
        decoding's pipeline while it abstains; what it finds is asked for again one token later."""
        if self._abstained:
            noise = self._noise.at(self._round, self._position())
            self._abstained = proposer.propose(self._committed, count, noise).size == 0
        return self._plain(ahead=self._abstained)

    def _submit(self, tokens: mx.array, chosen: mx.array | None) -> _Pending:
        """Start a pass over `tokens`, all final; `chosen` is what of it is not committed yet."""
        scores = self._target.advance(tokens, taps=self._taps)
        rows = self._law.rows(last_rows(scores.logits, 1), self._committed, chosen)
        position = self._position() + (0 if chosen is None else chosen.shape[1])
        verdict = self._rule.judge(rows, self._nothing, self._noise.at(self._round, position))
        mx.async_eval(verdict.next)
        self._round += 1
        self._recorder.add_pass()
        return _Pending(scores, verdict)

    def _speculate(self, proposer: Proposer, count: int) -> Emission:
        timed = self._recorder.wants_times()
        clock = self._recorder.clock
        started = began = clock()
        if timed:
            # Leads and replays of earlier rounds are still computed, and not by the draft.
            mx.synchronize()
            began = clock()
        noise = self._noise.at(self._round, self._position())
        proposal = proposer.propose(self._committed, count, noise)
        self._abstained = proposal.size == 0
        if self._abstained:
            return self._plain(ahead=True)
        if timed:
            mx.eval(proposal.tokens, *_present(proposal.rows))
        drafted_at = clock()
        tokens = mx.concatenate([self._unseen(), proposal.tokens], axis=1)
        scores = self._target.advance(tokens, proposed=proposal.size, taps=self._taps)
        if timed:
            mx.eval(scores.logits)
        verified_at = clock()
        rows = self._law.rows(
            last_rows(scores.logits, proposal.size + 1), self._committed, proposal.tokens
        )
        verdict = self._rule.judge(rows, proposal, noise)
        mx.async_eval(verdict.next, verdict.kept)
        self._round += 1
        self._recorder.add_pass()
        accepted = sum(_read(verdict.kept)[0])
        decided = [*_read(proposal.tokens)[0][:accepted], _read(verdict.next)[0]]
        emission = self._commit(decided, proposal, _Pending(scores, verdict))
        times = RoundTimes(clock() - started)
        if timed:
            times = RoundTimes(times.total, drafted_at - began, verified_at - drafted_at)
        self._recorder.add_speculative(
            proposal.size, accepted, len(emission.tokens), times, proposal.source
        )
        self._draft_length.observe(
            proposal.size, accepted, times.total, times.draft, proposal.source
        )
        return emission

    def _commit(self, tokens: list[int], proposal: Proposal, done: _Pending) -> Emission:
        position = self._position()
        self._committed += tokens
        emission = self._ending.take(tokens, drafted=len(tokens) - 1)
        if done.verdict.scored is not None:
            self._margins.add(done.verdict.scored, len(emission.tokens), position)
        if emission.finish_reason is None:
            self._settle(proposal, done, len(tokens) - 1)
            if self._check is not None and self._pending is None:
                self._check(self._committed)
        return emission

    def _settle(self, proposal: Proposal, done: _Pending, accepted: int) -> None:
        if proposal.size:
            self._target.rewind((len(self._committed) - 1,))
        if self._proposer is not None:
            self._proposer.observe(
                Round(proposal, done.verdict, done.scores, accepted, len(self._committed))
            )

    def _position(self) -> int:
        return len(self._committed) - self._prompt_length

    def _unseen(self) -> mx.array:
        return mx.array([self._committed[self._target.lengths[0] :]], dtype=mx.int32)


def _read(array: mx.array) -> Any:
    """To the host, waiting for it."""
    return array.tolist()


def _present(array: mx.array | None) -> tuple[mx.array, ...]:
    return () if array is None else (array,)
