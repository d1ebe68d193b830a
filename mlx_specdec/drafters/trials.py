"""Drafters that are hardly ever right are named."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..contracts import FINAL
from ..decoding.rounds import RoundReport
from ..drafting.drafter import Drafter
from ..options import Options
from ..pair import Pair

HOTTEST_TRIAL = 1.0
"""Temperature above which even good drafters are often refused."""
LAYERS_COUNTED = (
    ", or its config.json counts layers otherwise, which mlx-specdec inspect --probe tells"
)


class Trials:
    """Notices drafters that are hardly ever right, as decoding.rounds.RoundListener says.

    Texts of which a good drafter knows no more do not count: hot ones, and those that a constraint
    or a simulation decides.
    """

    def __init__(self, pair: Pair, chosen: Sequence[Drafter], options: Options) -> None:
        self._pair = pair
        telling = options.temperature <= HOTTEST_TRIAL and options.constraint is None
        counts = telling and options.simulated_acceptance is None
        self._tried = {each.name: each for each in chosen if each.nbytes and counts}
        # Rounds name who drafted only where several may.
        self._alone = chosen[0].name if len(chosen) == 1 else ""

    def on_round(self, report: RoundReport) -> None:
        """Counts up to the end of each drafter's trial."""
        for each in report.sequences:
            name = each.source or self._alone
            if each.drafted and name in self._tried:
                self._pair.trials[name].count(each.drafted, each.accepted)

    def tell(self) -> None:
        """Warns of a drafter that has failed, once for the pair."""
        riding = self._pair.speculator
        for name, each in self._tried.items():
            counted = riding is not None and riding.kind == name and FINAL not in riding.taps
            layers = LAYERS_COUNTED if counted else ""
            shown = each.identity or f"{name} of {self._pair.name}"
            if caution := self._pair.trials[name].caution(shown, layers):
                warnings.warn(caution, RuntimeWarning, stacklevel=4)
