"""The results that pass between models, proposers, rules and the loop, and what was computed of
one text and can be reused by another that begins alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

import mlx.core as mx

FINAL = "final"
"""The name of the hidden state that is the output head's input."""
NO_TOKEN = (1 << 31) - 1
"""A token id that no vocabulary has."""


def after(layer: int) -> str:
    """Return the name of the output of layer `layer`, counted from 0."""
    return f"after.{layer}"


def keys_of(layer: int) -> str:
    """Return the name of the keys of layer `layer`, heads concatenated, before rotary positions.
    Few models show them."""
    return f"keys.{layer}"


def values_of(layer: int) -> str:
    return f"values.{layer}"


@dataclass(frozen=True)
class Scores:
    """The results of one pass of a model. They are lazy: what nobody reads is not computed.

    logits: (batch, rows, vocabulary) in the model's dtype; row i is about the token after input i.
    hidden: requested hidden states by name, (batch, rows, width) in the model's dtype.
    encoded: of an encoder-decoder model, the encoder's output for each sequence: (1, n, width) with
        n tokens of its source. Empty for other models."""

    logits: mx.array
    hidden: Mapping[str, mx.array] = field(default_factory=dict)
    encoded: Sequence[mx.array] = ()

    def of(self, sequence: int, rows: int) -> Scores:
        """Return the first `rows` rows of one sequence, as a batch of one."""
        if self.logits.shape[:2] == (1, rows):
            return self
        part = slice(sequence, sequence + 1)
        hidden = {name: states[part, :rows] for name, states in self.hidden.items()}
        return Scores(self.logits[part, :rows], hidden, self.encoded[part])


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens of one round; a size of 0 means that the proposer abstains.

    tokens: (batch, n) int32, on the device.
    rows: (batch, n, vocabulary) float32, log q up to a constant per row: the distribution that each
        token was really drawn from. None means one-hot: all its probability is on its token.
    source: the name of who drafted, where several may; the costliest where sequences differ.
    sources: the names per sequence, where they differ.
    counts: how many tokens each sequence proposed; the rest of its row is padding, which
        `for_rules` masks. None means that every sequence proposed all of its row."""

    tokens: mx.array
    rows: mx.array | None = None
    source: str = ""
    counts: tuple[int, ...] | None = None
    sources: tuple[str, ...] | None = None

    @cached_property
    def size(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def none_accepted(self) -> mx.array:
        return mx.zeros(self.tokens.shape, dtype=mx.bool_)

    @classmethod
    def one_hot(cls, drafted: Sequence[Sequence[int]]) -> Proposal:
        """Make a proposal from token ids that were not drawn at random, one list per sequence;
        shorter ones are padded."""
        return cls(rectangle(drafted), counts=tuple(len(tokens) for tokens in drafted))

    def count(self, sequence: int) -> int:
        return self.size if self.counts is None else self.counts[sequence]

    def source_of(self, sequence: int) -> str:
        return self.source if self.sources is None else self.sources[sequence]

    def for_rules(self) -> Proposal:
        """Return the same proposal with NO_TOKEN and an empty row in place of padding, so that
        every rule rejects it and draws what follows from p alone."""
        if self.counts is None or min(self.counts) == self.size:
            return self
        drafted = mx.arange(self.size) < mx.array(self.counts)[:, None]
        rows = None if self.rows is None else mx.where(drafted[..., None], self.rows, -mx.inf)
        return replace(self, tokens=mx.where(drafted, self.tokens, NO_TOKEN), rows=rows)

    def of(self, sequence: int) -> Proposal:
        """Return the proposal for one sequence, as a batch of one."""
        part, count = slice(sequence, sequence + 1), self.count(sequence)
        rows = None if self.rows is None else self.rows[part, :count]
        return Proposal(self.tokens[part, :count], rows, self.source_of(sequence))


def rectangle(rows: Sequence[Sequence[int]]) -> mx.array:
    """Return (batch, longest) int32 from token ids, one list per sequence; shorter ones are padded
    at their end."""
    longest = max(map(len, rows))
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    return mx.array(filled, dtype=mx.int32).reshape(len(rows), longest)


def no_proposal(batch: int = 1) -> Proposal:
    """Return the empty proposal: of a proposer that abstains, and of a plain decoding step."""
    return Proposal(mx.zeros((batch, 0), dtype=mx.int32))


@dataclass(frozen=True)
class Verdict:
    """What a rule has decided about one proposal, on the device.

    accepted: (batch, n) bool, always True up to the first rejected token and False from there.
    next: (batch,) int32, the token after the accepted ones: correction or bonus; -1 if the largest
        entry of the target's row is NaN or infinite, so that nothing can be chosen from it."""

    accepted: mx.array
    next: mx.array


@dataclass(frozen=True)
class SequenceRound:
    """A finished round of one sequence.

    drafted, accepted: numbers of tokens. emitted: how many of accepted + 1 tokens were emitted.
    position: of the first of them, counted from 0. committed: all committed tokens. ended: the text
    ended here. left: tokens that may follow. source: the name of who drafted, where several may."""

    drafted: int
    accepted: int
    emitted: int
    position: int
    committed: Sequence[int]
    ended: bool = False
    left: int = 0
    source: str = ""


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round; draft and verify are None where it was not timed in parts. The total
    alone includes work that earlier rounds left to the device."""

    total: float
    draft: float | None = None
    verify: float | None = None


@dataclass(frozen=True)
class RoundReport:
    """One finished round.

    size: the most tokens drafted for a sequence, 0 for a plain step. source: see Proposal. passes:
    of the target that were submitted in it, replays included. pipelined: the pass for the next
    token is in flight. ended: it was the last round, after which nothing is rewound. waiting:
    requests wait for places of the batch."""

    size: int
    sequences: tuple[SequenceRound, ...]
    times: RoundTimes
    source: str = ""
    passes: int = 1
    pipelined: bool = False
    ended: bool = False
    waiting: bool = False

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.sequences)

    @property
    def even(self) -> bool:
        """Whether all sequences would end together."""
        return len({each.left for each in self.sequences}) == 1

    @property
    def drained(self) -> bool:
        """Whether a plain step only emptied the pipeline, which takes less time than others."""
        return self.size == 0 and not self.pipelined


class RoundListener(Protocol):
    """Gets a report of every round, in order. What it does must not change the next round."""

    def on_round(self, report: RoundReport) -> None:
        """Take the report of a round, after contexts were rewound and proposers have observed."""


TARGET = "target"
"""The name of the target's part; the parts of proposers have other names."""


@dataclass(frozen=True)
class KVSlice:
    """Keys and values of a text's first `length` tokens, which can be cut to fewer: arrays of
    (1, heads, length, width), never written to."""

    length: int
    arrays: tuple[mx.array, ...]
    value: ClassVar[None] = None
    exact: ClassVar[bool] = False
    is_snapshot: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Snapshot:
    """State after exactly `length` tokens, which cannot be cut to fewer.

    value: what the model that made it needs to read the arrays; None where they are all of it.
    exact: it can be reused for this very text only, as with an encoder, which looks both ways."""

    length: int
    value: str | None
    arrays: tuple[mx.array, ...]
    exact: bool = False
    is_snapshot: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


Cached = KVSlice | Snapshot


@dataclass(frozen=True)
class Reusable:
    """What a context or a proposer has computed of one sequence.

    length: the number of columns. columns: returns the columns from one position to before another,
    as lazy views of arrays that are still being written. lag: number of later tokens that each
    column depends on. snapshot: in place of columns, where there is one now."""

    length: int = 0
    columns: Callable[[int, int], tuple[mx.array, ...]] | None = None
    lag: int = 0
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """What a prompt cache has of the beginning of a prompt: for Model.open, and by name for
    Proposer.recall."""

    target: Cached | None = None
    proposer: Mapping[str, Cached] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt the target need not read."""
        return 0 if self.target is None else self.target.length


NOTHING = CachedPrefix()
