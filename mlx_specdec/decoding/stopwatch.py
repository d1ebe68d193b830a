"""The only clock of decoding: times rounds, in parts where that is wanted, for its listeners.

Timing parts takes barriers between them, which cost overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx

from ..interfaces import Proposal, Scores
from ..interfaces.rounds import RoundListener, RoundReport, RoundTimes, SequenceRound

FIRST = 4
TIMED_EVERY = 32
Timed = Literal["none", "some", "all"]
"""Which speculative rounds are timed in parts: none; the FIRST and one in TIMED_EVERY; all."""


class Stopwatch:
    """Times the stages of a round as the loop passes them.

    listeners: get a report of every round. shared: whether others have work for the device between
    two rounds; each round then waits for all that it has submitted, so that its time has nothing
    else in it. clock: seconds.
    """

    def __init__(
        self,
        listeners: Sequence[RoundListener] = (),
        *,
        timed: Timed = "none",
        shared: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._listeners = tuple(listeners)
        self._which = timed
        self._shared = shared
        self._speculative = 0
        self._passes = 0
        self._timed = False
        self._started = 0.0
        self._began = 0.0
        self._drafted_at = 0.0
        self._verified_at = 0.0

    def begin(self, *, drafts: bool) -> None:
        """A round begins, in which tokens may be drafted or not."""
        self._passes = 0  # of a round that has failed
        self._timed = drafts and self._in_parts()
        self._started = self.clock()
        if self._timed:
            # What earlier rounds left to the device is still computed, and not by the draft.
            mx.synchronize()
            self._began = self.clock()

    def _in_parts(self) -> bool:
        if self._which != "some":
            return self._which == "all"
        return self._speculative < FIRST or self._speculative % TIMED_EVERY == 0

    def drafted(self, proposal: Proposal) -> None:
        """The proposal has been built; a timed round waits for it."""
        self._timed = self._timed and proposal.size > 0
        if self._timed:
            mx.eval(proposal.tokens, [] if proposal.rows is None else proposal.rows)
            self._drafted_at = self.clock()

    def advanced(self, scores: Scores) -> None:
        """The target's pass has been built; a timed round waits for it."""
        self._passes += 1
        if self._timed:
            mx.eval(scores.logits)
            self._verified_at = self.clock()

    def finish(
        self,
        proposal: Proposal,
        sequences: tuple[SequenceRound, ...],
        *,
        pipelined: bool,
        ended: bool,
    ) -> None:
        """The round is over: report it to the listeners."""
        if self._shared():
            mx.synchronize()
        times = RoundTimes(self.clock() - self._started)
        if self._timed:
            draft, verify = self._drafted_at - self._began, self._verified_at - self._drafted_at
            times = RoundTimes(times.total, draft, verify)
        self._speculative += proposal.size > 0
        passes, self._passes, self._timed = self._passes, 0, False
        report = RoundReport(
            proposal.size, sequences, times, proposal.source, passes, pipelined, ended
        )
        for listener in self._listeners:
            listener.on_round(report)
