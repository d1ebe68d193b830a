"""Protocols of models, contexts (a model's state of a batch), proposers, rules and their noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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

    def merge(self, other: Context) -> None:
        """Append the sequences of another context of the same model. The caller must not use the
        other context afterwards. `Model.open_batch` opened both."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, at least one, in this order, and free the memory of all other rows."""

    def snapshot(self, sequence: int) -> Reusable:
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


class NoiseSource(Protocol):
    """Makes the noise of one sequence, one round at a time."""

    def at(self, round: int, position: int) -> Noise:
        """Return the noise of a round. `position` is the output position of the round's first
        token, from 0; it never decreases."""

    def draw_ahead(self) -> None:
        """Submit the noise that the next round may need, while the device would be idle."""
        return None


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
