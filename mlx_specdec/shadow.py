"""For debugging: contexts whose shadows are compared with the committed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from .contracts import Model
from .decoding.rounds import RoundListener, RoundReport
from .drafting.translation import Translation
from .models.base import Base
from .models.checked import CheckedModel
from .pair import Pair


class Shadow:
    """Compares a model's contexts with the committed tokens after every round that rewinds."""

    def __init__(self, model: CheckedModel, translation: Translation | None = None) -> None:
        self._model = model
        self._translation = translation

    def on_round(self, report: RoundReport) -> None:
        """As RoundListener says."""
        if not report.pipelined and not report.ended:
            committed = report.sequences[0].committed
            feed = self._translation.feed if self._translation is not None else list
            self._model.compare(feed(committed))


def checked(pair: Pair) -> tuple[Model, Pair, list[RoundListener]]:
    """The same target and pair, whose contexts are compared with shadows of their own."""
    target = CheckedModel(pair.target)
    shadows: list[RoundListener] = [Shadow(target)]
    if pair.draft is not None:
        draft = CheckedModel(pair.draft)
        shadows.append(Shadow(draft, pair.translation))
        # Drafting only opens contexts of it.
        pair = replace(pair, draft=cast(Base, draft))
    return target, pair, shadows
