"""Statistics of one text, from its rounds.

Nothing after the last emitted token is counted, drafted tokens included.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..interfaces.rounds import RoundReport, RoundTimes, SequenceRound
from .margins import Margins


@dataclass(frozen=True)
class Seconds:
    """Wall time in seconds.

    draft and verify are scaled up from the rounds that were timed in parts; plain steps, whose
    passes overlap, count as verify; other is what remains of the time after the prompt pass. All
    three are None where tokens were drafted and no round was timed in parts.
    """

    load: float
    prompt: float
    draft: float | None
    verify: float | None
    other: float | None
    total: float

    @property
    def decoding(self) -> float:
        """All after the prompt."""
        return self.total - self.load - self.prompt


@dataclass(frozen=True)
class SmallestMargin:
    """The least margin of a chosen token, as decoding.margins has it, and its position.

    There is none where no position had a second candidate.

    Two kernels can disagree on the text only where their rounding differs by more than this.
    """

    value: float
    position: int


@dataclass(frozen=True)
class SourceFigures:
    """Figures of one of several proposers: rounds with its drafts, tokens drafted and accepted."""

    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Statistics:
    """Figures of one text.

    rounds: verdicts, plain steps included. target_passes: passes of the target after the prompt,
    the last one of pipelined plain decoding included, which nobody reads. timed_rounds: speculative
    rounds that were timed in parts. *_by_position: entry i is about the i-th drafted token of a
    round. by_source: by proposer, where several drafted. tokens_per_second: generated tokens over
    the time after the prompt pass. peak_memory_bytes: of the process since this text was begun,
    weights included.
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
    smallest_margin: SmallestMargin | None
    seconds: Seconds
    tokens_per_second: float | None
    peak_memory_bytes: int
    device: str
    blas: str

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        return asdict(self)


class Recorder:
    """A RoundListener that collects the statistics of one text."""

    def __init__(self) -> None:
        self._rounds = 0
        self._passes = 0
        self._generated = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._by_source: dict[str, SourceFigures] = {}
        self._timed = 0
        self._timed_total = 0.0
        self._timed_draft = 0.0
        self._timed_verify = 0.0
        self._speculative_total = 0.0
        self._plain_total = 0.0
        self._margins = Margins(self._add_margins)
        self._margin: SmallestMargin | None = None

    def on_round(self, report: RoundReport) -> None:
        """Count a round. Raises DecodingError where the target's logits turn out to be damaged."""
        self._rounds += 1
        self._passes += report.passes
        for each in report.sequences:
            self._generated += each.emitted
            if each.scored is not None:
                self._margins.add(each.scored, each.emitted, each.position, each.cut)
            if report.size:
                self._add_drafts(each)
        if report.size:
            self._add_times(report.times)
        else:
            self._plain_total += report.times.total
        if report.ended:
            self._margins.flush()

    def _add_drafts(self, each: SequenceRound) -> None:
        drafted, accepted = each.drafted, min(each.accepted, each.emitted)
        if each.ended:
            drafted = min(drafted, each.emitted)
        _count(self._drafted, drafted)
        _count(self._accepted, accepted)
        if each.source:
            before = self._by_source.get(each.source, SourceFigures(0, 0, 0))
            self._by_source[each.source] = SourceFigures(
                before.rounds + 1, before.drafted + drafted, before.accepted + accepted
            )

    def _add_times(self, times: RoundTimes) -> None:
        self._speculative_total += times.total
        if times.draft is not None and times.verify is not None:
            self._timed += 1
            self._timed_total += times.total
            self._timed_draft += times.draft
            self._timed_verify += times.verify

    def _add_margins(self, margins: list[float], position: int) -> None:
        for offset, value in enumerate(margins):
            if value < (math.inf if self._margin is None else self._margin.value):
                self._margin = SmallestMargin(value, position + offset)

    def summary(
        self,
        *,
        load: float,
        prompt: float,
        decoding: float,
        peak_memory_bytes: int,
        device: str,
        blas: str,
    ) -> Statistics:
        """Return all figures, once, after the last round; waits for margins still being computed.

        load, prompt, decoding: seconds of loading, reading the prompt, and all after it.
        """
        self._margins.flush()
        draft, verify, other = self._parts(decoding)
        drafted, accepted = sum(self._drafted), sum(self._accepted)
        return Statistics(
            rounds=self._rounds,
            drafted=drafted,
            accepted=accepted,
            acceptance_rate=_ratio(accepted, drafted),
            tokens_per_round=_ratio(self._generated, self._rounds),
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(
                self._accepted + [0] * (len(self._drafted) - len(self._accepted))
            ),
            by_source=dict(self._by_source),
            target_passes=self._passes,
            timed_rounds=self._timed,
            smallest_margin=self._margin,
            seconds=Seconds(
                load=load,
                prompt=prompt,
                draft=draft,
                verify=verify,
                other=other,
                total=load + prompt + decoding,
            ),
            tokens_per_second=_ratio(self._generated, decoding),
            peak_memory_bytes=peak_memory_bytes,
            device=device,
            blas=blas,
        )

    def _parts(self, decoding: float) -> tuple[float | None, float | None, float | None]:
        """Divide `decoding` seconds into drafting, verifying, and the rest."""
        if self._speculative_total and not self._timed:
            return None, None, None
        scale = self._speculative_total / self._timed_total if self._timed_total else 0.0
        draft = self._timed_draft * scale
        verify = self._timed_verify * scale + self._plain_total
        return draft, verify, max(0.0, decoding - draft - verify)


def _count(by_position: list[int], count: int) -> None:
    by_position.extend([0] * (count - len(by_position)))
    for index in range(count):
        by_position[index] += 1


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
