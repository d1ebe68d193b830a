"""What a round was, for whoever listens: statistics, draft lengths, margins, debugging shadows.

Listeners never stand in the way of a round: it does not depend on what they answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class SequenceRound:
    """What a round was for one sequence.

    drafted, accepted: tokens. emitted: what the reader got of accepted + 1 tokens. position: of the
    first of them, counted from 0. committed: all committed tokens. scored: see contracts.Verdict,
    the rows of this sequence. cut: what its filters cut from, None without filters. ended: nothing
    follows what was emitted. source: who drafted, where several may.
    """

    drafted: int
    accepted: int
    emitted: int
    position: int
    committed: Sequence[int]
    scored: mx.array | None = None
    cut: Cut | None = None
    ended: bool = False
    source: str = ""


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round; draft and verify are None where it was not timed in parts.

    total has in it whatever earlier rounds left to the device; the parts have not.
    """

    total: float
    draft: float | None = None
    verify: float | None = None


@dataclass(frozen=True)
class RoundReport:
    """One finished round.

    size: drafted tokens of the rectangle, 0 for a plain step. source: whose drafts were paid for,
    where several may draft. passes: of the target that were submitted in it. pipelined: the pass
    for the next token is in flight already. ended: it was the last round, after which nothing is
    rewound.
    """

    size: int
    sequences: tuple[SequenceRound, ...]
    times: RoundTimes
    source: str = ""
    passes: int = 1
    pipelined: bool = False
    ended: bool = False

    @property
    def accepted(self) -> int:
        """Drafted tokens that stayed, of all sequences."""
        return sum(each.accepted for each in self.sequences)


def is_drained(report: RoundReport) -> bool:
    """Whether a plain step only emptied the pipeline, so that it says nothing of what one costs."""
    return report.size == 0 and not report.pipelined


class RoundListener(Protocol):
    """Hears of every round, in their order."""

    def on_round(self, report: RoundReport) -> None:
        """A round is over; contexts are rewound and proposers have observed it."""
        ...


@dataclass(frozen=True)
class Cut:
    """What the filters of one sequence cut from, and what drew; nothing is computed from it yet.

    before: (1, rows, vocabulary) log p up to a constant, before top-k, top-p and min-p. gumbel:
    (1, rows, vocabulary), added to what passed.
    """

    before: mx.array
    gumbel: mx.array
    top_k: int
    top_p: float
    min_p: float

    def first(self, rows: int) -> Cut:
        """The same of the first rows alone."""
        if self.before.shape[1] == rows:
            return self
        return replace(self, before=self.before[:, :rows], gumbel=self.gumbel[:, :rows])
