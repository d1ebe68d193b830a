"""What was computed of a text, kept for another one that begins alike. Imports MLX alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

TARGET = "target"
"""The name of what the target computed; what proposers did has names of their own."""


@dataclass(frozen=True)
class Columns:
    """Of a text's first `length` tokens, position by position: of fewer tokens it is the beginning
    of this. arrays: (1, heads, length, width) each, never written to."""

    length: int
    arrays: tuple[mx.array, ...]


@dataclass(frozen=True)
class Whole:
    """Of exactly `length` tokens, where it cannot be cut to fewer.

    value: of the model that made it, never written to; None where the arrays say it all. arrays:
    all that are in it. exact: whether it serves this very text alone, and none that goes on behind
    it: an encoder looks both ways.
    """

    length: int
    value: object
    arrays: tuple[mx.array, ...]
    exact: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays)


Kept = Columns | Whole


@dataclass(frozen=True)
class Memory:
    """What a context or a proposer can hand on of one sequence.

    length: how many columns there are. columns: of positions from one to before another, lazy views
    of what goes on being written. lag: how many tokens behind a column's own it was made of as
    well. whole: where columns cannot be had, if there is something to be had now.
    """

    length: int = 0
    columns: Callable[[int, int], tuple[mx.array, ...]] | None = None
    lag: int = 0
    whole: Whole | None = None


@dataclass(frozen=True)
class Beginning:
    """What is known of the beginning of a prompt, and need not be computed again.

    target: for Model.open. proposer: for Proposer.recall, by name.
    """

    target: Kept | None = None
    proposer: Mapping[str, Kept] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt the target does not read again."""
        return 0 if self.target is None else self.target.length


NOTHING = Beginning()
