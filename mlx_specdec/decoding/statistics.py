"""Statistics of one text up to the last emitted token, and the only clock of decoding."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import mlx.core as mx

from .. import process
from ..interfaces import Proposal, Scores
from ..interfaces.results import RoundListener, RoundReport, RoundTimes, SequenceRound

DAMAGED = (
    "the model's logits are not numbers (NaN or infinite): its weights are damaged, or its "
    "precision is too low for them; try --dtype float32"
)


@dataclass(frozen=True)
class Seconds:
    """Wall times of one completion in seconds.

    Attributes:
        load: Loading the pair.
        prompt: The prefill, drafters included.
        prompt_draft: The share of the drafters in `prompt`.
        draft: Drafting. This and `verify` are scaled up from the rounds that were timed in parts;
            both and `other` are None if there was no such round.
        verify: Passes of the target after the prefill, with those of plain steps.
        other: The rest of the time after the prefill.
        total: All of it.
    """

    load: float
    prompt: float
    prompt_draft: float
    draft: float | None
    verify: float | None
    other: float | None
    total: float

    @property
    def decoding(self) -> float:
        """The time after the prefill."""
        return self.total - self.load - self.prompt


@dataclass(frozen=True)
class SourceFigures:
    """Figures of one of several proposers.

    Attributes:
        rounds: The rounds with a proposal of this proposer.
        drafted: Its draft tokens.
        accepted: How many of them were accepted.
    """

    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Statistics:
    """Figures of one completion, up to its last token.

    Attributes:
        rounds: Verifications, plain steps included.
        drafted: The number of draft tokens.
        accepted: How many of them were accepted.
        acceptance_rate: accepted / drafted; None without draft tokens.
        tokens_per_round: Generated tokens per round; None without rounds.
        drafted_by_position, accepted_by_position: Entry i is about the i-th draft token of a round.
        by_source: Figures by proposer, if several proposed.
        target_passes: Passes after the prefill, with those that replay accepted tokens. Pipelined
            decoding submits one that nobody reads.
        timed_rounds: Speculative rounds that were timed in parts.
        seconds: Wall times.
        tokens_per_second: Generated tokens per second after the prefill; None if that took no time.
        peak_memory_bytes: MLX's peak since the request began, weights included.
        device: "cpu", or the name of the GPU.
        blas: The BLAS of the CPU, such as "mkl" or "accelerate".
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    tokens_per_round: float | None
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    by_source: dict[str, SourceFigures]
    target_passes: int
    timed_rounds: int
    seconds: Seconds
    tokens_per_second: float | None
    peak_memory_bytes: int
    device: str
    blas: str

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as the commands print it with --json."""
        return asdict(self)


class Recorder:
    """A RoundListener that collects the statistics of one text. drafts: of each speculative round,
    who drafted, and the tokens drafted and accepted."""

    def __init__(self) -> None:
        self._passes = 0
        self._generated = 0
        self.drafts: list[tuple[str, int, int]] = []
        self._times: list[tuple[bool, RoundTimes]] = []

    def on_round(self, report: RoundReport) -> None:
        """Count a round."""
        self._passes += report.passes
        self._times.append((report.size > 0, report.times))
        for each in report.sequences:
            self._generated += each.emitted
            if report.size:
                drafted = min(each.drafted, each.emitted) if each.ended else each.drafted
                self.drafts.append((each.source, drafted, min(each.accepted, each.emitted)))

    def summary(
        self, *, load: float, prompt: float, decoding: float, prompt_draft: float = 0.0
    ) -> Statistics:
        """Return all figures, once, after the last round. load, prompt, decoding: seconds of
        loading, reading the prompt, and all after it. prompt_draft: see Seconds."""
        drafted = [each for _, each, _ in self.drafts]
        accepted = [each for _, _, each in self.drafts]
        positions = range(max(drafted, default=0))
        sources: dict[str, SourceFigures] = {}
        for name in dict.fromkeys(source for source, _, _ in self.drafts if source):
            its = [counts for source, *counts in self.drafts if source == name]
            figures = SourceFigures(len(its), sum(n for n, _ in its), sum(n for _, n in its))
            sources[name] = figures
        speculative = [times for drafts, times in self._times if drafts]
        timed = [times for times in speculative if times.draft is not None]
        draft, verify, other = self._parts(speculative, timed, decoding)
        return Statistics(
            rounds=len(self._times),
            drafted=sum(drafted),
            accepted=sum(accepted),
            acceptance_rate=_ratio(sum(accepted), sum(drafted)),
            tokens_per_round=_ratio(self._generated, len(self._times)),
            drafted_by_position=tuple(sum(n > at for n in drafted) for at in positions),
            accepted_by_position=tuple(sum(n > at for n in accepted) for at in positions),
            by_source=sources,
            target_passes=self._passes,
            timed_rounds=len(timed),
            seconds=Seconds(
                load, prompt, prompt_draft, draft, verify, other, load + prompt + decoding
            ),
            tokens_per_second=_ratio(self._generated, decoding),
            peak_memory_bytes=mx.get_peak_memory(),
            device=process.device_name(),
            blas=process.name(),
        )

    def _parts(
        self, speculative: Sequence[RoundTimes], timed: Sequence[RoundTimes], decoding: float
    ) -> tuple[float | None, float | None, float | None]:
        """Divide `decoding` seconds into drafting, verifying, and the rest."""
        total = sum(times.total for times in speculative)
        if total and not timed:
            return None, None, None
        scale = total / sum(times.total for times in timed) if total else 0.0
        plain = sum(times.total for drafts, times in self._times if not drafts)
        draft = scale * sum(times.draft or 0.0 for times in timed)
        verify = scale * sum(times.verify or 0.0 for times in timed) + plain
        return draft, verify, max(0.0, decoding - draft - verify)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


FIRST = 4
TIMED_EVERY = 32
Timed = Literal["none", "some", "all"]
"""Which speculative rounds are timed in parts: none; the FIRST and one in TIMED_EVERY; all."""


@dataclass(eq=False)
class Stopwatch:
    """Times the stages of a round as the loop passes them. listeners: get a report of every round.
    shared: whether others use the device between two rounds; each round then waits for all that it
    has submitted. clock: seconds."""

    listeners: Sequence[RoundListener] = ()
    timed: Timed = "none"
    shared: Callable[[], bool] = lambda: False
    waiting: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    _speculative: int = field(default=0, init=False)

    def begin(self, *, drafts: bool) -> None:
        """A round begins, in which tokens may be drafted or not."""
        self._passes = 0
        due = self._speculative < FIRST or self._speculative % TIMED_EVERY == 0
        self._timed = drafts and (self.timed == "all" or (self.timed == "some" and due))
        self._started = self.clock()
        if self._timed:
            # What earlier rounds left to the device is still computed, and not by the draft.
            mx.synchronize()
            self._began = self.clock()

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

    def rewound(self, passes: int) -> None:
        """The target has dropped rejected tokens, which took `passes` passes."""
        self._passes += passes

    def finish(
        self,
        proposal: Proposal,
        sequences: tuple[SequenceRound, ...],
        *,
        pipelined: bool,
        ended: bool,
    ) -> None:
        """The round is over: report it to the listeners."""
        if self.shared():
            mx.synchronize()
        times = RoundTimes(self.clock() - self._started)
        if self._timed:
            draft, verify = self._drafted_at - self._began, self._verified_at - self._drafted_at
            times = RoundTimes(times.total, draft, verify)
        self._speculative += proposal.size > 0
        names = proposal.source, self._passes, pipelined, ended, self.waiting()
        report = RoundReport(proposal.size, sequences, times, *names)
        for listener in self.listeners:
            listener.on_round(report)
