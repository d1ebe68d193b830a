"""The description of a proposer before it exists, and the settings that make it. Imports no MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..core.proposer import Proposer
    from ..core.worth import Prices
    from ..models.drafters.medusa import MedusaHeads
    from ..models.drafters.network import DrafterNetwork
    from ..text.vocabulary import Translation
    from ..types import Model
    from .text_index import History, TextIndex


LONGEST_CONSIDERED = 16
"""Largest draft length to consider, in tokens, if a proposer has no smaller limit."""


class LoadedPair(Protocol):
    """The parts of a loaded pair that drafters are made from; see engine.pair.Pair."""

    @property
    def draft(self) -> Model | None: ...
    @property
    def draft_name(self) -> str | None: ...
    @property
    def translation(self) -> Translation | None: ...
    @property
    def heads(self) -> MedusaHeads | None: ...
    @property
    def drafter_network(self) -> DrafterNetwork | None: ...
    @property
    def documents(self) -> TextIndex | None: ...
    @property
    def history(self) -> History | None: ...


@dataclass(frozen=True)
class Setup:
    """How a proposer works together with others.

    Attributes:
        followed: Whether another proposer drafts if this one abstains.
        eager: Returns whether the proposer should prefill before its first draft.
        prices: Returns the measured costs of rounds of a number of rows; None if the proposer must
            not choose its own draft length."""

    followed: bool = False
    eager: Callable[[], bool] = lambda: True
    prices: Callable[[int], Prices | None] = lambda rows: None


@dataclass(frozen=True)
class Drafter:
    """A kind of proposer that a loaded pair supports.

    Attributes:
        name: Name in the table of proposers.
        make: Makes the proposer.
        most: Largest draft length to consider, in tokens.
        nbytes: Size of the weights in bytes. A drafter without weights costs almost nothing.
        identity: Distinguishes drafters of the same name, such as draft models.
        stops: Whether the proposer shortens its proposals by `Setup.prices`.
        causes: Why its draft tokens may hardly ever be accepted, for a warning."""

    name: str
    make: Callable[[Setup], Proposer]
    most: int = LONGEST_CONSIDERED
    nbytes: int = 0
    identity: str = ""
    stops: bool = False
    causes: str = (
        "was probably made for another target, or for the model that this one was fine-tuned from"
    )
