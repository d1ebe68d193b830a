"""A model, and the state of sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from .results import Scores, rectangle
from .reusable import Cached, Reusable


class Context(Protocol):
    """The state of a batch in one model: encoder output where there is one, and the KV cache."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen per sequence, without rewound ones."""

    @property
    def replays(self) -> bool:
        """Whether a rewind into a pass of several tokens costs another pass over some of them."""

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """Append tokens and return the scores of their rows.

        tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
        proposed: how many of the last tokens are not committed and may be taken back by `rewind`.
            A pass with proposed = 0 makes everything before it final.
        taps: names of hidden states to return: FINAL, `after(i)` for the output of layer i, and
            `keys_of(i)` and `values_of(i)`, which few models show.

        Raises OptionError where the model cannot show such a hidden state.
        """

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Forget all but the first `lengths` tokens, which are committed from then on.

        Raises RewindError where `lengths` is longer than what was seen, or shorter than what the
        caller declared as final. Never silently does less.
        """

    def evaluate(self) -> None:
        """Compute everything seen so far, without its logits, and wait for it."""

    def join(self, other: Context) -> None:
        """Append the sequences of another context of the same model, which must not be used any
        more. Both were opened by `Model.open_batch`."""

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, at least one, in this order, and free the others' memory."""

    def reusable(self, sequence: int) -> Reusable:
        """Return what another sequence that begins alike may be opened with."""


def feed(context: Context, tokens: Sequence[Sequence[int]], taps: Sequence[str] = ()) -> Scores:
    """Append committed tokens to a context, one list per sequence, not all of them empty. Rows of
    the result after a sequence's own tokens mean nothing."""
    longest, shortest = max(map(len, tokens)), min(map(len, tokens))
    lengths = context.lengths
    scores = context.advance(rectangle(tokens), longest - shortest, taps)
    if longest > shortest:
        context.rewind(tuple(n + len(own) for n, own in zip(lengths, tokens, strict=True)))
    return scores


class Model(Protocol):
    """A loaded model: shared weights from which contexts are opened."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""

    @property
    def max_length(self) -> int | None:
        """Longest committed sequence in tokens, prompt included; None where there is no limit."""

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """Return the committed tokens before the first generated one: the prompt of a decoder-only
        model, the decoder's start token of an encoder-decoder model. Never empty."""

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> Context:
        """Return a context that has seen the part of `prefix(prompt)` that is `cached`.

        An encoder-decoder model has its source and encodes it with the first pass. cached: of the
        prompt's beginning, from a context's `reusable`. Raises PromptError for a prompt that is
        empty or longer than `max_length`.
        """

    @property
    def batches(self) -> bool:
        """Whether sequences of different lengths can go through one pass; see `open_batch`."""

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        """Return a context of several sequences, each as in `open`, which others may join. cached:
        one entry per sequence, or none at all.

        Raises PromptError as `open` does, and OptionError for models that cannot.
        """


class TargetModel(Model, Protocol):
    """A model with what drafters that read its hidden states use: its embedding and its head, with
    whatever scale, cap or tie the family has."""

    @property
    def width(self) -> int:
        """Width of the hidden states."""

    @property
    def state_dtype(self) -> mx.Dtype:
        """Dtype of the hidden states."""

    @property
    def layers(self) -> int:
        """How many layers have a hidden state: `after(0)` to `after(layers - 1)`."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input: (batch, m) int32 -> (batch, m, width)."""

    def head(self, states: mx.array) -> mx.array:
        """Return logits: (batch, m, width), like the state FINAL -> (batch, m, vocabulary)."""
