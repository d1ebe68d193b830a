"""A proposer that drafts no more for each sequence than that sequence allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..contracts import Noise, Proposal, Proposer, Scores, no_proposal
from ..kept import Kept, Memory
from .row_by_row import side_by_side


class Limited(Proposer):
    """Proposer that passes on what another one proposes.

    limits: the most tokens in a round, one entry per sequence; of a row with 0 nothing is verified
    but what fills up the rectangle.
    """

    batches = True

    def __init__(self, proposer: Proposer, limits: Sequence[int]) -> None:
        self._proposer = proposer
        self._limits = list(limits)
        self.taps = proposer.taps
        self.needs = proposer.needs

    def recall(self, lengths: Sequence[int], kept: Sequence[Mapping[str, Kept]]) -> None:
        """As contracts.Proposer says."""
        self._proposer.recall(lengths, kept)

    def memories(self, sequence: int) -> Mapping[str, Memory]:
        """As contracts.Proposer says."""
        return self._proposer.memories(sequence)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """As contracts.Proposer says."""
        self._proposer.begin(prompts)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any sequence allows drafts, and the other one would draft."""
        most = min(limit, max(self._limits))
        return most > 0 and self._proposer.ready(committed, most)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What the other one proposes, cut to the limits."""
        most = min(limit, max(self._limits))
        if most == 0:
            return no_proposal(len(committed))
        made = self._proposer.propose(committed, most, noise)
        counts = tuple(min(made.count(row), own) for row, own in enumerate(self._limits))
        if all(made.count(row) == count for row, count in enumerate(counts)):
            return made
        cut = replace(made, counts=counts)
        each = [cut.of(row) for row in range(len(counts))]
        return replace(side_by_side(each), source=made.source)

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """As contracts.Proposer says."""
        self._proposer.observe(tokens, scores)

    def join(self, other: Limited) -> None:
        """As contracts.Proposer says."""
        self._proposer.join(other._proposer)
        self._limits += other._limits

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        self._proposer.filter(keep)
        self._limits = [self._limits[row] for row in keep]
