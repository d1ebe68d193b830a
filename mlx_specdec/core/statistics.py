"""The statistics of one completion, and the stopwatch of the rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from .. import system
from ..results import Seconds, SourceFigures, Statistics, Step
from ..types import Proposal, Scores


@dataclass(frozen=True)
class Timed:
    """Seconds of one round. `draft` and `verify` are None unless the round was timed in parts. Only
    `total` includes work of earlier rounds that was still running on the device.

    Attributes:
        passes: The number of target passes that were submitted in the round.
        interval: Seconds since the verdict of the round before; None if something else took a part
            of them.
        pipelined: Whether the pass for the next token is in flight.
        drafts: Whether any row of the group had draft tokens."""

    total: float
    passes: int = 1
    interval: float | None = None
    pipelined: bool = False
    drafts: bool = False
    draft: float | None = None
    verify: float | None = None


def summary(
    rounds: Sequence[tuple[Step, Timed]],
    *,
    load: float,
    prompt: float,
    decoding: float,
    prompt_draft: float = 0.0,
) -> Statistics:
    """Return the statistics of one row.

    Args:
        rounds: The row's step in each round, and the times of the round.
        load: Seconds of loading the pair.
        prompt: Seconds of the prefill.
        decoding: Seconds after the prefill.
        prompt_draft: Seconds of the proposers during the prefill."""
    speculative = [(step, times) for step, times in rounds if times.drafts]
    drafted = [step.drafted for step, _ in speculative]
    accepted = [step.accepted for step, _ in speculative]
    generated = sum(len(step.tokens) for step, _ in rounds)
    positions = range(max(drafted, default=0))
    sources: dict[str, SourceFigures] = {}
    for name in dict.fromkeys(step.proposer for step, _ in speculative if step.proposer):
        own = [step for step, _ in speculative if step.proposer == name]
        counts = sum(step.drafted for step in own), sum(step.accepted for step in own)
        sources[name] = SourceFigures(len(own), *counts)
    draft, verify, other = _parts([times for _, times in rounds], decoding)
    return Statistics(
        rounds=len(rounds),
        drafted=sum(drafted),
        accepted=sum(accepted),
        acceptance_rate=ratio(sum(accepted), sum(drafted)),
        tokens_per_round=ratio(generated, len(rounds)),
        drafted_by_position=tuple(sum(n > at for n in drafted) for at in positions),
        accepted_by_position=tuple(sum(n > at for n in accepted) for at in positions),
        by_source=sources,
        target_passes=sum(times.passes for _, times in rounds),
        timed_rounds=sum(times.draft is not None for _, times in speculative),
        seconds=Seconds(load, prompt, prompt_draft, draft, verify, other, load + prompt + decoding),
        tokens_per_second=ratio(generated, decoding),
        peak_memory_bytes=mx.get_peak_memory(),
        device=system.device_name(),
        blas=system.blas_name(),
    )


def _parts(
    rounds: Sequence[Timed], decoding: float
) -> tuple[float | None, float | None, float | None]:
    """Divide `decoding` seconds into seconds of drafting, verification and other work."""
    total = sum(times.total for times in rounds if times.drafts)
    timed = [times for times in rounds if times.drafts and times.draft is not None]
    if total and not timed:
        return None, None, None
    scale = total / sum(times.total for times in timed) if total else 0.0
    plain = sum(times.total for times in rounds if not times.drafts)
    draft = scale * sum(times.draft or 0.0 for times in timed)
    verify = scale * sum(times.verify or 0.0 for times in timed) + plain
    return draft, verify, max(0.0, decoding - draft - verify)


def ratio(part: float, total: float) -> float | None:
    """Return part / total; None if the total is 0."""
    return part / total if total else None


FIRST_TIMED = 4
TIMED_EVERY = 32
"""If speculative rounds are timed in parts, these are the first FIRST_TIMED rounds and every
TIMED_EVERY-th round: timing in parts makes a round wait for the device."""


@dataclass(eq=False)
class Stopwatch:
    """A stopwatch for the stages of a round, which the loop notifies of each stage.

    Attributes:
        timed: Whether some rounds are timed in parts."""

    timed: bool = False
    clock: Callable[[], float] = time.perf_counter
    _speculative: int = field(default=0, init=False)
    _judged: tuple[object, float] | None = field(default=None, init=False)
    _interval: float | None = field(default=None, init=False)

    def begin(self, *, drafts: bool) -> None:
        """Start a round. drafts: Whether the round calls the proposer."""
        self._passes = 0
        due = self._speculative < FIRST_TIMED or self._speculative % TIMED_EVERY == 0
        self._in_parts = self.timed and drafts and due
        self._started = self.clock()
        if self._in_parts:
            # Wait for work of earlier rounds, which must not count as drafting.
            mx.synchronize()
            self._began = self.clock()

    def drafted(self, proposal: Proposal) -> None:
        """Record that the proposal was submitted; a timed round waits for it."""
        self._in_parts = self._in_parts and proposal.size > 0
        if self._in_parts:
            mx.eval(proposal.tokens, [] if proposal.rows is None else proposal.rows)
            self._drafted_at = self.clock()

    def advanced(self, scores: Scores) -> None:
        """Record that the target's pass was submitted; a timed round waits for it."""
        self._passes += 1
        if self._in_parts:
            mx.eval(scores.logits)
            self._verified_at = self.clock()

    def judged(self, group: object) -> None:
        """Record that the verdict of a group's round is there."""
        now, before = self.clock(), self._judged
        alone = before is not None and before[0] is group and not self._in_parts
        self._interval = now - before[1] if before is not None and alone else None
        self._judged = group, now

    def interrupt(self) -> None:
        """Record that something else than a round has used the device."""
        self._judged = None

    def finish(self, proposal: Proposal, *, pipelined: bool) -> Timed:
        """Finish the round and return its times."""
        drafts = proposal.size > 0
        self._speculative += drafts
        total = self.clock() - self._started
        timed = Timed(total, self._passes, self._interval, pipelined, drafts)
        if not self._in_parts:
            return timed
        self.interrupt()
        draft, verify = self._drafted_at - self._began, self._verified_at - self._drafted_at
        return replace(timed, draft=draft, verify=verify)
