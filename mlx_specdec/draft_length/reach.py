"""How far drafts get that may end sooner than they were asked to."""

from __future__ import annotations

from collections.abc import Sequence

from ..interfaces.rounds import SequenceRound
from .acceptance import Acceptance
from .speedup import ending_sooner


class Reach:
    """stops: a draft may end sooner than asked, and its next token counts as one that would not
    have stayed: that is what a round of such a length brings. Until some are seen to, none does.
    """

    def __init__(self, most: int, stops: bool) -> None:
        self._stops = stops
        self._reached = Acceptance(most, earlier=((1e3,) * most,) * 2)

    def add(self, asked: int, sequences: Sequence[SequenceRound]) -> None:
        """Count how far drafts got of which so many tokens were asked."""
        self._reached.add([(asked, each.drafted) for each in sequences if each.drafted])

    def judged(self, asked: int, its: SequenceRound) -> int:
        """How many tokens of a draft count for or against its acceptance."""
        return its.drafted + (self._stops and 0 < its.drafted < asked)

    def costs(self, costs: Sequence[float]) -> Sequence[float]:
        """What rounds cost in which so many tokens may be drafted. costs: in which so many are."""
        return ending_sooner(costs, self._reached.emitted()) if self._stops else costs
