"""What passes between models, drafting, verification and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx

FINAL = "final"
"""The hidden state that the output head is given."""
NO_TOKEN = (1 << 31) - 1
"""An id that no vocabulary has."""


def after(layer: int) -> str:
    """The name of the hidden state that layer `layer`, counted from 0, puts out."""
    return f"after.{layer}"


def keys_of(layer: int) -> str:
    """The name of the keys that layer `layer` makes, its heads side by side, before positions turn
    them. Few models show them."""
    return f"keys.{layer}"


def values_of(layer: int) -> str:
    """The name of the values beside them."""
    return f"values.{layer}"


@dataclass(frozen=True)
class Scores:
    """What one pass of a model yields, lazily: what nobody reads is not computed.

    logits: (batch, rows, vocabulary) in the model's dtype; row i is about the token after input i.
    hidden: per name asked for, (batch, rows, width) in the model's dtype.
    encoded: of an encoder-decoder model, what its encoder made of each sequence's source: (1, n,
        width), n being that source's own length; none of others.
    """

    logits: mx.array
    hidden: Mapping[str, mx.array] = field(default_factory=dict)
    encoded: Sequence[mx.array] = ()

    def of(self, sequence: int, rows: int) -> Scores:
        """The first `rows` rows of one sequence, as a batch of one."""
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
        token was really drawn from. None means one-hot: all its probability lay on its token.
    source: who drafted, where several may; the dearest of them where sequences differ.
    sources: who drafted for each sequence, where they differ.
    counts: how many tokens each sequence proposed; the rest of its row only fills the rectangle,
        and `for_rules` takes it out. None means that every sequence proposed all of its row.
    """

    tokens: mx.array
    rows: mx.array | None = None
    source: str = ""
    counts: tuple[int, ...] | None = None
    sources: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """How many tokens each row of the rectangle has."""
        return self.tokens.shape[1]

    @cached_property
    def none_kept(self) -> mx.array:
        """(batch, n) bool: no row stays."""
        return mx.zeros(self.tokens.shape, dtype=mx.bool_)

    @classmethod
    def one_hot(cls, drafted: Sequence[Sequence[int]]) -> Proposal:
        """From token ids that nothing was drawn for, one list per sequence; shorter ones are
        filled up."""
        return cls(rectangle(drafted), counts=tuple(len(tokens) for tokens in drafted))

    def count(self, sequence: int) -> int:
        """How many tokens this sequence proposed."""
        return self.size if self.counts is None else self.counts[sequence]

    def source_of(self, sequence: int) -> str:
        """Who drafted for this sequence."""
        return self.source if self.sources is None else self.sources[sequence]

    def for_rules(self) -> Proposal:
        """The same proposal with NO_TOKEN and an empty row in each place that only fills the
        rectangle, so that every rule rejects these places and draws what follows from p alone."""
        if self.counts is None or min(self.counts) == self.size:
            return self
        drafted = mx.arange(self.size) < mx.array(self.counts)[:, None]
        rows = None if self.rows is None else mx.where(drafted[..., None], self.rows, -mx.inf)
        return replace(self, tokens=mx.where(drafted, self.tokens, NO_TOKEN), rows=rows)

    def of(self, sequence: int) -> Proposal:
        """That for one sequence alone, as a batch of one."""
        part, count = slice(sequence, sequence + 1), self.count(sequence)
        rows = None if self.rows is None else self.rows[part, :count]
        return Proposal(self.tokens[part, :count], rows, self.source_of(sequence))


def rectangle(rows: Sequence[Sequence[int]]) -> mx.array:
    """(batch, longest) int32 from token ids, one list per sequence; shorter ones are filled up
    behind their end."""
    longest = max(map(len, rows))
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    return mx.array(filled, dtype=mx.int32).reshape(len(rows), longest)


def no_proposal(batch: int = 1) -> Proposal:
    """What a proposer returns to abstain, and what a plain decoding step verifies."""
    return Proposal(mx.zeros((batch, 0), dtype=mx.int32))


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one proposal, on the device.

    kept: (batch, n) bool, the proposal's rows that stay; in a chain always a prefix.
    next: (batch,) int32, the token that follows the kept ones: correction or bonus; -1 where the
        target's row is damaged, so that nothing can be drawn from it.
    scored: (batch, n + 1, vocabulary), log p + g of the target's rows where its choice is their
        argmax (statistics want to know by how much), or None.
    """

    kept: mx.array
    next: mx.array
    scored: mx.array | None = None
