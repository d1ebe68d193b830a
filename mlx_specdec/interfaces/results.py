"""The results that pass between models, proposers, rules and the loop, and the cached state that
sequences with a common prefix share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx

FINAL = "final"
"""Name of the hidden state that is the input of the output head."""
NO_TOKEN = (1 << 31) - 1
"""A token id that no vocabulary has."""


def after(layer: int) -> str:
    """Return the name of the output of layer `layer`, counted from 0."""
    return f"after.{layer}"


def keys_of(layer: int) -> str:
    """Return the name of the keys of layer `layer`, heads concatenated, before rotary embedding.
    Few models return them."""
    return f"keys.{layer}"


def values_of(layer: int) -> str:
    """Return the name of the values of layer `layer`; see `keys_of`."""
    return f"values.{layer}"


@dataclass(frozen=True)
class Scores:
    """The lazy results of one pass of a model. MLX computes only the results that are used.

    Attributes:
        logits: (batch, rows, vocabulary) in the model's dtype. Row i predicts the token after
            input token i.
        hidden: Requested hidden states by name, (batch, rows, width) in the model's dtype.
        encoded: Encoder output per sequence, (1, n, width) for n source tokens. Empty for a
            decoder-only model."""

    logits: mx.array
    hidden: Mapping[str, mx.array] = field(default_factory=dict)
    encoded: Sequence[mx.array] = ()

    def of(self, sequence: int, rows: int) -> Scores:
        """Return the first `rows` rows of one sequence, as a batch of one."""
        if self.logits.shape[:2] == (1, rows):
            return self
        return SequenceScores(self, sequence, rows)


class SequenceScores(Scores):
    """The first rows of one sequence of a pass. They are cut out when they are read, because most
    proposers do not read them, and a batch has many sequences."""

    _scores: Scores
    _part: slice
    _rows: int

    def __init__(self, scores: Scores, sequence: int, rows: int) -> None:
        self.__dict__.update(_scores=scores, _part=slice(sequence, sequence + 1), _rows=rows)

    @cached_property
    def logits(self) -> mx.array:
        return self._scores.logits[self._part, : self._rows]

    @cached_property
    def hidden(self) -> Mapping[str, mx.array]:
        hidden = self._scores.hidden
        return {name: states[self._part, : self._rows] for name, states in hidden.items()}

    @cached_property
    def encoded(self) -> Sequence[mx.array]:
        return self._scores.encoded[self._part]


def joined(parts: Sequence[Scores]) -> Scores:
    """Return the results of successive passes over the same sequences as those of one pass."""
    if len(parts) == 1:
        return parts[0]
    hidden = {
        name: mx.concatenate([part.hidden[name] for part in parts], axis=1)
        for name in parts[0].hidden
    }
    logits = mx.concatenate([part.logits for part in parts], axis=1)
    return Scores(logits, hidden, parts[0].encoded)


@dataclass(frozen=True)
class Proposal:
    """The draft tokens of one round. A proposer abstains with a proposal of size 0.

    Attributes:
        tokens: (batch, n) int32, on the device.
        rows: (batch, n, vocabulary) float32, log q up to a constant per row: the distributions from
            which the tokens were drawn. None means one-hot distributions.
        source: Name of the proposer, if the request has several. If sequences have different
            proposers, the name of the most expensive one.
        sources: Names of the proposers per sequence, if they differ.
        counts: Number of draft tokens per sequence. The remaining tokens of a row are padding,
            which `for_rules` masks. None means that there is no padding."""

    tokens: mx.array
    rows: mx.array | None = None
    source: str = ""
    counts: tuple[int, ...] | None = None
    sources: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """The number n of draft tokens per row, padding included."""
        return self.tokens.shape[1]

    @classmethod
    def one_hot(cls, drafted: Sequence[Sequence[int]]) -> Proposal:
        """Make a proposal from token ids that were not drawn at random, one list per sequence.
        Shorter lists are padded."""
        return cls(rectangle(drafted), counts=tuple(len(tokens) for tokens in drafted))

    def count(self, sequence: int) -> int:
        """Return the number of draft tokens of one sequence."""
        return self.size if self.counts is None else self.counts[sequence]

    def source_of(self, sequence: int) -> str:
        """Return the name of the proposer of one sequence, if the request has several."""
        return self.source if self.sources is None else self.sources[sequence]

    def for_rules(self) -> Proposal:
        """Return the proposal with padding replaced by NO_TOKEN and rows of zero probability. Every
        rule rejects NO_TOKEN, and then draws the next token from the target's distribution."""
        if self.counts is None or min(self.counts) == self.size:
            return self
        drafted = mx.arange(self.size) < mx.array(self.counts)[:, None]
        rows = None if self.rows is None else mx.where(drafted[..., None], self.rows, -mx.inf)
        return replace(self, tokens=mx.where(drafted, self.tokens, NO_TOKEN), rows=rows)

    def cut(self, most: Sequence[int]) -> Proposal:
        """Return the proposal with at most `most[row]` draft tokens of each sequence."""
        counts = tuple(min(self.count(row), count) for row, count in enumerate(most))
        size = max(counts)
        rows = None if self.rows is None else self.rows[:, :size]
        return replace(self, tokens=self.tokens[:, :size], rows=rows, counts=counts)

    def of(self, sequence: int) -> Proposal:
        """Return the proposal for one sequence, as a batch of one."""
        part, count = slice(sequence, sequence + 1), self.count(sequence)
        rows = None if self.rows is None else self.rows[part, :count]
        return Proposal(self.tokens[part, :count], rows, self.source_of(sequence))


def rectangle(rows: Sequence[Sequence[int]]) -> mx.array:
    """Return (batch, longest) int32 from token ids, one list per sequence. Shorter lists are padded
    at the end."""
    longest = max(map(len, rows))
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    return mx.array(filled, dtype=mx.int32).reshape(len(rows), longest)


def no_proposal(batch: int = 1) -> Proposal:
    """Return the empty proposal, for plain decoding steps and proposers that abstain."""
    return Proposal(mx.zeros((batch, 0), dtype=mx.int32))


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule about one proposal, on the device.

    Attributes:
        accepted: (batch, n) bool, True up to the first rejected token and False from there.
        next: (batch,) int32, the correction or bonus token after the accepted tokens. It is -1 if
            the largest entry of the target's row is NaN or infinite."""

    accepted: mx.array
    next: mx.array


TARGET = "target"
"""Name of the target's cached state; the states of proposers have other names."""


@dataclass(frozen=True)
class Cached:
    """The state of the first `length` tokens of a sequence: keys and values, or a snapshot.

    Attributes:
        arrays: Arrays that are never written to. Keys and values have the shape (1, heads, length,
            width).
        is_snapshot: Whether the state is a snapshot. Unlike keys and values, a snapshot cannot be
            cut to fewer tokens.
        description: Description of a snapshot for the model that made it; None if it needs none.
        exact: Whether only the same prompt may reuse the state, as with a bidirectional encoder."""

    length: int
    arrays: tuple[mx.array, ...]
    is_snapshot: bool = False
    description: str | None = None
    exact: bool = False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Reusable:
    """The state of one sequence that a prompt cache may store.

    Attributes:
        length: The number of KV positions.
        columns: A function that returns the KV positions from a start up to, not including, an
            end, as lazy views of arrays that are still being written.
        lag: How many later tokens the state of each position depends on.
        snapshot: A snapshot in place of KV positions; None if there is none at present."""

    length: int = 0
    columns: Callable[[int, int], tuple[mx.array, ...]] | None = None
    lag: int = 0
    snapshot: Cached | None = None
