"""The types that models, proposers, rules and the loop share: their protocols, and the frozen
results that pass between them.

Arrays have a leading batch axis. Python lists and tuples have one entry per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx

Progress = Callable[[int, int], None]
"""Called with (done, total) units of long work, first with done = 0 and last with done = total."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress of long work; the default `Progress`."""


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
        part = slice(sequence, sequence + 1)
        hidden = {name: states[part, :rows] for name, states in self.hidden.items()}
        return Scores(self.logits[part, :rows], hidden, self.encoded[part])


def joined(parts: Sequence[Scores]) -> Scores:
    """Join the results of successive passes over the same sequences into one."""
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
    """The draft tokens of one round. If its size is 0, the proposer drafts nothing in this round.

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
        positions: A function that returns the KV positions from a start up to, not including, an
            end, as lazy views of arrays that are still being written.
        lag: How many later tokens the state of each position depends on.
        snapshot: A snapshot in place of KV positions; None if there is none at present."""

    length: int = 0
    positions: Callable[[int, int], tuple[mx.array, ...]] | None = None
    lag: int = 0
    snapshot: Cached | None = None


UNEVEN = 64
"""The most rows of a pass that appends different numbers of tokens to recurrent states. A rewind
of such a pass needs up to 3 MB of projections per row in a model of 27 billion parameters."""


class Context(Protocol):
    """The state of a batch in one model: the KV cache, and the output of an encoder if any."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in the KV cache per sequence, without rewound tokens."""

    @property
    def checkpoints(self) -> bool:
        """Whether `snapshot` returns states that cannot be cut to fewer tokens."""

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: Sequence[str] = ()) -> Scores:
        """Append tokens and return the scores of their rows.

        Args:
            tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
            proposed: How many of the last tokens are not committed, so that `rewind` may drop
                them. A pass with proposed = 0 makes all earlier tokens final.
            hidden: Names of hidden states to return: FINAL, `after(i)` for the output of layer i,
                and `keys_of(i)` and `values_of(i)`. Raises OptionError if the model cannot return
                one of them."""

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Drop all but the first `lengths` tokens, which are committed from then on.

        This takes no pass. Raises RewindError if `lengths` exceeds the cached tokens or would drop
        final tokens; a context never silently drops fewer tokens.
        """

    def evaluate(self) -> None:
        """Compute the state of all tokens so far, but not their logits, and wait for it."""

    def merge(self, other: Context) -> None:
        """Append the sequences of another context of the same model. The caller must not use the
        other context afterwards. `Model.open_batch` opened both."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, at least one, in this order, and free the memory of all other rows."""

    def snapshot(self, sequence: int) -> Reusable:
        """Return the state with which a sequence that shares a prefix may be opened."""


def feed(context: Context, tokens: Sequence[Sequence[int]], hidden: Sequence[str] = ()) -> Scores:
    """Append committed tokens to a context, one list per sequence, not all of them empty.

    The result has as many rows as the longest list; rows after the tokens of a sequence are
    meaningless."""
    longest, shortest = max(map(len, tokens)), min(map(len, tokens))
    size = longest
    if longest - shortest > UNEVEN and context.checkpoints:
        # A rewind needs the projections of all rows that may be undone, so undo few at a time.
        size = shortest or UNEVEN
    scores, start = [], 0
    while start < longest:
        part = [row[start : start + size] for row in tokens]
        ends = [n + len(row) for n, row in zip(context.lengths, part, strict=True)]
        rows = max(map(len, part))
        scores.append(context.advance(rectangle(part), rows - min(map(len, part)), hidden))
        if len(set(map(len, part))) > 1:
            context.rewind(tuple(ends))
        start, size = start + size, UNEVEN
    return joined(scores)


class Model(Protocol):
    """A loaded model: shared weights from which contexts are opened."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens, prompt included; None if there is no limit."""

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """Return the committed tokens before the first generated one: the prompt of a decoder-only
        model, the decoder's start token of an encoder-decoder model. Never empty."""

    @property
    def why_not_batched(self) -> str:
        """Why sequences of different lengths cannot go through one pass, in one line without the
        model's name; "" if they can."""

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        """Return a context of sequences, which further contexts may join unless `why_not_batched`.
        An encoder-decoder model encodes its sources in the first pass.

        Args:
            cached: For each sequence, the state of the first tokens of its prefix, which need no
                prefill, from `Context.snapshot`; empty if nothing is cached.
        Raises:
            PromptError: A prompt is empty or longer than `max_length`.
            OptionError: There are several prompts, and the model does not support batches.
        """


class TargetModel(Model, Protocol):
    """A model that shares its embedding and output head with hidden-state drafters. Both include
    the scaling, logit cap or weight tying of the model family."""

    @property
    def width(self) -> int:
        """Width of the hidden states."""

    @property
    def state_dtype(self) -> mx.Dtype:
        """Dtype of the hidden states."""

    @property
    def layers(self) -> int:
        """The number of layers, whose outputs are `after(0)` to `after(layers - 1)`."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input: (batch, m) int32 -> (batch, m, width)."""

    def head(self, states: mx.array) -> mx.array:
        """Return logits: hidden states FINAL, (batch, m, width) -> (batch, m, vocabulary)."""


class Noise(Protocol):
    """The randomness of one round, whose first position has index 0. A method returns None if there
    is no noise of its kind, as at temperature 0."""

    def draft(self, index: int) -> mx.array | None:
        """Return the Gumbel noise for draft token `index`, (batch, 1, vocabulary) float32."""
        return None

    def target(self, count: int) -> mx.array | None:
        """Return Gumbel noise for the target's choices, (batch, count, vocabulary) float32."""
        return None

    def accept(self, count: int) -> mx.array | None:
        """Return uniform numbers in [0, 1) that decide whether draft tokens 0 .. count - 1 are
        accepted, (batch, count) float32."""
        return None

    def correction(self) -> mx.array | None:
        """Return Gumbel noise for the correction or bonus token, (batch, vocabulary) float32."""
        return None

    def of(self, sequence: int) -> Noise:
        """Return the noise of one sequence alone."""
        return self


class Proposer(Protocol):
    """A source of draft tokens for one completion, which a caller writes and gives to
    `stream_generate`. It never sees the target's probabilities of positions that it has yet to
    draft. A class that inherits from it only has to define `propose`.

    All lists have one entry, since such a proposer drafts for one completion."""

    hidden: tuple[str, ...] = ()
    """Names of the target's hidden states that `observe` needs: "final", or "after.0" for the
    output of the first layer."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin a completion. The prompt of an encoder-decoder model is the source."""
        return None

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Return whether `propose` would draft anything now. This is called while a plain step is
        in flight. It must be cheap and must not change later proposals."""
        return True

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Draft tokens after the committed ones, without blocking.

        Args:
            committed: All committed tokens.
            limit: Maximum number of draft tokens, at least 1."""

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Receive the target's results for a chunk of the prompt or for a round. This is not called
        after the last round.

        Args:
            tokens: Tokens that the target processed since the last call. All are committed; the
                newest committed token is not among them.
            scores: The target's results for exactly these tokens, lazy."""
        return None


Rule = Callable[[mx.array, Proposal, Noise, float], Verdict]
"""A function `(log_p, proposal, noise, delta)` that decides which draft tokens are accepted and
which token follows them.

Args:
    log_p: (batch, n + 1, vocabulary), the target's log-probabilities up to a constant per row,
        after bias, penalties and filters. Row i is the distribution of the position of
        proposal.tokens[:, i], and the last row of the bonus token. float32 if the temperature is
        above 0.
    proposal: The result of `Proposal.for_rules`. A rule never accepts ids outside the target's
        vocabulary.
    noise: The randomness of the round.
    delta: The lenience, from 0 to 1. Exact rules do not use it."""
