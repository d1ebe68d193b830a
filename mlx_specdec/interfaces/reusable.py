"""What was computed of one text and can be reused by another that begins alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

TARGET = "target"
"""The name of the target's part; the parts of proposers have other names."""


@dataclass(frozen=True)
class KVSlice:
    """Keys and values of a text's first `length` tokens, which can be cut to fewer.

    arrays: (1, heads, length, width) each, never written to.
    """

    length: int
    arrays: tuple[mx.array, ...]


@dataclass(frozen=True)
class Snapshot:
    """State after exactly `length` tokens, which cannot be cut to fewer.

    value: for the model that made it, never written to; None where the arrays are all of it.
    arrays: all that it holds. exact: whether it can be reused for this very text only and not for a
    longer one, as with an encoder, which looks both ways.
    """

    length: int
    value: object
    arrays: tuple[mx.array, ...]
    exact: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays)


Cached = KVSlice | Snapshot


@dataclass(frozen=True)
class Reusable:
    """What a context or a proposer has computed of one sequence.

    length: the number of columns. columns: returns the columns from one position to before another,
    as lazy views of arrays that are still being written. lag: number of later tokens that each
    column depends on. snapshot: in place of columns, where there is one now.
    """

    length: int = 0
    columns: Callable[[int, int], tuple[mx.array, ...]] | None = None
    lag: int = 0
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """What a prompt cache has of the beginning of a prompt.

    target: for Model.open. proposer: for Proposer.recall, by name.
    """

    target: Cached | None = None
    proposer: Mapping[str, Cached] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt the target need not read."""
        return 0 if self.target is None else self.target.length


NOTHING = CachedPrefix()
