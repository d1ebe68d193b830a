"""What a drafter is made from, and what is known of it before it drafts. Imports no MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..sampling.settings import Sampling

if TYPE_CHECKING:
    from ..interfaces import Model, Prices, Proposer, TargetModel
    from ..models.drafters.medusa import MedusaHeads
    from ..models.drafters.network import DrafterNetwork
    from ..sampling.constraint import Constraint
    from ..sampling.grammar import Grammar
    from ..text.vocabulary import Translation
    from .documents import DocumentIndex
    from .text_index import History


MOST_DRAFTED = 16
"""The longest proposal worth considering where a drafter has no limit of its own, in tokens."""


class LoadedPair(Protocol):
    """The parts of a loaded pair that drafters are made from; see engine.pair.Pair."""

    @property
    def target(self) -> TargetModel: ...
    @property
    def vocabulary(self) -> int: ...
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
    def documents(self) -> DocumentIndex | None: ...
    @property
    def history(self) -> History | None: ...
    @property
    def unusable(self) -> Mapping[str, str]: ...

    def constraint(self, grammar: Grammar | None) -> Constraint | None: ...


@dataclass(frozen=True)
class Setup:
    """What the proposer of one request is made with. followed: another drafter proposes where this
    one abstains. eager: a draft is wanted as soon as the prompt is read. prices: returns what
    rounds cost so far; None where the length of a proposal is not the drafter's to choose.
    tenant: whose earlier texts may be drafted from."""

    sampling: Sampling
    ngram_min: int | None = None
    ngram_choice: str = "recent"
    grammar: Grammar | None = None
    followed: bool = False
    eager: bool = True
    prices: Callable[[], Prices | None] | None = None
    tenant: str = ""


@dataclass(frozen=True)
class Drafter:
    """A drafter that a pair has.

    name: as in the table of drafters. make: makes the proposer of one request. most: the longest
    proposal worth considering, in tokens. nbytes: size of its weights; 0 costs next to nothing.
    identity: which drafter of this name it is. stops: it ends its proposals early, by prices."""

    name: str
    make: Callable[[Setup], Proposer]
    most: int = MOST_DRAFTED
    nbytes: int = 0
    identity: str = ""
    stops: bool = False


TRIAL = 64
"""Drafted tokens after which a trial ends."""
LEAST_VERIFIED = 16
"""Tokens that the target must have verified by then. It verifies no further than the first wrong
token of a proposal, so that long proposals count no more than short ones."""
LEAST_ACCEPTED = 0.1
"""Share of the verified tokens. Drafters that gain anything have several times that."""
CAUSES = "was probably made for another target, or for the model that this one was fine-tuned from"
OWN_CAUSES = (
    "is a part of the target and rarely agrees with it as it is: take more layers or bits, or "
    "train a draft with mlx-specdec train-draft"
)


class Trial:
    """Finds out from the first drafted tokens whether a drafter fits its target at all."""

    def __init__(self) -> None:
        self._drafted = self._verified = self._accepted = 0
        self._warned = False

    def caution(self, rounds: Iterable[Sequence[int]], name: str, causes: str = CAUSES) -> str:
        """Count the tokens drafted and accepted in further rounds, and return a warning about the
        drafter of this name if it has failed; empty after the first time, and if it has not.
        causes: why a drafter of its kind fails."""
        over = False
        for drafted, accepted in (*rounds, (0, 0)):
            over = self._drafted >= TRIAL and self._verified >= LEAST_VERIFIED
            if over:
                break
            self._drafted += drafted
            self._verified += min(drafted, accepted + 1)
            self._accepted += accepted
        if self._warned or not over or self._accepted >= LEAST_ACCEPTED * self._verified:
            return ""
        self._warned = True
        return (
            f"hardly any draft tokens are accepted ({self._accepted} of {self._drafted}): {name} "
            f"{causes}"
        )
