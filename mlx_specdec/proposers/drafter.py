"""What a drafter is made from, and what is known of it before it drafts. Imports no MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..sampling.settings import Sampling

if TYPE_CHECKING:
    from ..interfaces import Model, Proposer, TargetModel
    from ..models.drafters.medusa import MedusaHeads
    from ..models.drafters.network import Speculator
    from ..sampling.constraint import Constraint
    from ..sampling.grammar import Grammar
    from ..text.vocabulary import Translation
    from .documents import DocumentIndex


MOST_DRAFTED = 16
"""The longest proposal that is worth considering where a drafter has no limit of its own."""


class Brought(Protocol):
    """What a loaded pair brings for drafters; see pair.Pair."""

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
    def speculator(self) -> Speculator | None: ...
    @property
    def documents(self) -> DocumentIndex | None: ...
    @property
    def unusable(self) -> Mapping[str, str]: ...

    def constraint(self, grammar: Grammar | None) -> Constraint | None: ...


class Asked(Protocol):
    """What the user may ask of drafters; see options.Options."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def ngram_min(self) -> int | None: ...
    @property
    def ngram_choice(self) -> str: ...
    @property
    def constraint(self) -> Grammar | None: ...


@dataclass(frozen=True)
class Drafter:
    """A drafter that a pair has.

    name: as in the table, and the source of its proposals. make: makes the proposer of one
    sequence; `first` says that another drafter is asked where it abstains. most: the longest
    proposal worth considering, in tokens. nbytes: of its weights; 0 where it has none and costs
    next to nothing. identity: which one of this name it is, where rounds of another one may cost
    something else. stops: its proposals may end sooner than asked, where the next token is not
    worth its verification.
    """

    name: str
    make: Callable[[Asked, bool], Proposer]
    most: int = MOST_DRAFTED
    nbytes: int = 0
    identity: str = ""
    stops: bool = False
