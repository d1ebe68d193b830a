"""Reports of rounds for listeners: statistics, draft lengths, margins, debugging shadows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class SequenceRound:
    """A finished round of one sequence.

    drafted, accepted: numbers of tokens. emitted: how many of accepted + 1 tokens were emitted.
    position: of the first of them, counted from 0. committed: all committed tokens. scored: see
    Verdict, the rows of this sequence. cut: None without filters. ended: the text ended here.
    source: the name of who drafted, where several may.
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

    total includes work that earlier rounds left to the device; the parts do not.
    """

    total: float
    draft: float | None = None
    verify: float | None = None


@dataclass(frozen=True)
class RoundReport:
    """One finished round.

    size: the most tokens drafted for a sequence, 0 for a plain step. source: the name of who
    drafted, where several may; the costliest where sequences differ. passes: of the target that
    were submitted in it. pipelined: the pass for the next token is in flight already. ended: it was
    the last round, after which nothing is rewound.
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
        """Accepted tokens of all sequences."""
        return sum(each.accepted for each in self.sequences)


def is_drained(report: RoundReport) -> bool:
    """Return whether a plain step only emptied the pipeline, which takes less time than others."""
    return report.size == 0 and not report.pipelined


class RoundListener(Protocol):
    """Gets a report of every round, in order. What it does must not change the next round."""

    def on_round(self, report: RoundReport) -> None:
        """Take the report of a round, after contexts were rewound and proposers have observed."""


@dataclass(frozen=True)
class Cut:
    """The input of one sequence's filters and the noise that drew; lazy.

    before: (1, rows, vocabulary) log p up to a constant, before top-k, top-p and min-p. gumbel:
    (1, rows, vocabulary), added to what passed.
    """

    before: mx.array
    gumbel: mx.array
    top_k: int
    top_p: float
    min_p: float

    def first(self, rows: int) -> Cut:
        """Return the same for the first rows alone."""
        if self.before.shape[1] == rows:
            return self
        return replace(self, before=self.before[:, :rows], gumbel=self.gumbel[:, :rows])
