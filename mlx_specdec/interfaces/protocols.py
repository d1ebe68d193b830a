"""Protocols of models, contexts (a model's state of a batch), proposers, rules and their noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

import mlx.core as mx

from .results import Cached, Proposal, Reusable, Scores, Verdict, joined, rectangle

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
        """Whether `reusable` returns snapshots, which cannot be cut to fewer tokens."""

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """Append tokens and return the scores of their rows.

        Args:
            tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
            proposed: How many of the last tokens are not committed, so that `rewind` may drop
                them. A pass with proposed = 0 makes all earlier tokens final.
            taps: Names of hidden states to return: FINAL, `after(i)` for the output of layer i,
                and `keys_of(i)` and `values_of(i)`. Raises OptionError if the model cannot return
                one of them."""

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Drop all but the first `lengths` tokens, which are committed from then on.

        This takes no pass. Raises RewindError if `lengths` exceeds the cached tokens or would drop
        final tokens; a context never silently drops fewer tokens.
        """

    def evaluate(self) -> None:
        """Compute the state of all tokens so far, but not their logits, and wait for it."""

    def join(self, other: Context) -> None:
        """Append the sequences of another context of the same model. The caller must not use the
        other context afterwards. `Model.open_batch` opened both."""

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, at least one, in this order, and free the memory of all other rows."""

    def reusable(self, sequence: int) -> Reusable:
        """Return the state with which a sequence that shares a prefix may be opened."""


def feed(context: Context, tokens: Sequence[Sequence[int]], taps: Sequence[str] = ()) -> Scores:
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
        scores.append(context.advance(rectangle(part), rows - min(map(len, part)), taps))
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

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> Context:
        """Return the context of a batch of one sequence; see `open_batch`."""

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
                prefill, from `Context.reusable`; empty if nothing is cached.
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


class NoiseSource(Protocol):
    """Makes the noise of one sequence, one round at a time."""

    def at(self, round: int, position: int) -> Noise:
        """Return the noise of a round. `position` is the output position of the round's first
        token, from 0; it never decreases."""

    def draw_ahead(self) -> None:
        """Submit the noise that the next round may need, while the device would be idle."""
        return None


@dataclass(frozen=True)
class Prices:
    """The measured costs of rounds, in plain decoding steps.

    Attributes:
        rounds: Entry n is the cost of a round with draft length n.
        token: The value of one emitted token."""

    rounds: Sequence[float]
    token: float

    def worth(self, chances: Sequence[float]) -> int:
        """Return the draft length whose expected tokens exceed its cost by most; 0 if no draft
        length is worth it.

        Args:
            chances: Entry i is the probability that draft tokens 0 .. i are all accepted; for a
                batch, the mean over its rows."""
        expected = accumulate(chances, initial=1.0)
        costs = zip(expected, self.rounds, strict=False)
        values = [tokens * self.token - cost for tokens, cost in costs]
        best = max(range(len(values)), key=values.__getitem__)
        return best if values[best] > 0 else 0


class Proposer(Protocol):
    """A source of draft tokens. It never sees the target's probabilities of positions that it has
    yet to draft. A class that inherits from this Protocol only has to define `propose`."""

    taps: tuple[str, ...] = ()
    """Names of the target's hidden states that `observe` needs."""
    batches: bool = False
    """Whether one proposer drafts for several sequences, with `join` and `filter`. If not, every
    sequence of a batch has its own proposer."""
    chances: Sequence[float] = ()
    """Entry i is the estimated probability that the next draft tokens 0 .. i are all accepted.
    Empty if the proposer has no estimate."""
    needs: tuple[str, ...] = ()
    """Names of the cached states that `recall` requires for all cached tokens of the target."""

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """Restore the state of cached prefixes. The loop calls this before `begin`.

        Args:
            lengths: Number of tokens per sequence that the target does not prefill, so that
                `observe` never receives them.
            cached: State of at most that many tokens, by name, per sequence."""
        return None

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin new sequences, one per prompt. The prompt of an encoder-decoder model is the
        source."""
        return None

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """Return the state, by name, that a sequence which shares a prefix may recall."""
        return {}

    def join(self, other: Self) -> None:
        """Append the sequences of another proposer, which the caller must not use afterwards."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, at least one, in this order."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Return whether `propose` would draft anything now. The loop calls this while a plain step
        is in flight. It must be cheap and must not change later proposals."""
        return True

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Draft tokens after each sequence, without blocking.

        Args:
            committed: All committed tokens, one list per sequence.
            limit: Maximum number of draft tokens per sequence, at least 1."""

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Receive the target's results for a chunk of the prompt or for a round. The loop does not
        call this after the last round.

        Args:
            tokens: Tokens that the target processed since the last call, per sequence. All are
                committed; the newest committed token is not among them.
            scores: The target's rows for exactly these tokens, per sequence, lazy."""
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
