"""A model, and the state of sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from .results import Scores, rectangle
from .reusable import Kept, Memory


class Context(Protocol):
    """The state of a batch in one model: encoder output where there is one, and the KV cache."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen per sequence, rewound ones not counted."""
        ...

    @property
    def replays(self) -> bool:
        """Whether a rewind into a pass of several tokens costs another pass over the kept ones."""
        ...

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """See more tokens.

        tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
        proposed: how many of the last tokens are not committed and may be taken back by `rewind`.
            A pass with proposed = 0 makes everything before it final.
        taps: names of hidden states to return: FINAL, `after(i)` for the output of layer i, and
            `keys_of(i)` and `values_of(i)`, which few models show.

        Raises OptionError where the model cannot show such a hidden state.
        """
        ...

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Forget all but the first `lengths` tokens; what stays is committed from here on.

        Raises RewindError where `lengths` is longer than what was seen, or shorter than what the
        caller declared as final. Never silently does less than was asked.
        """
        ...

    def evaluate(self) -> None:
        """Compute what was seen so far, without its logits, and wait for it."""
        ...

    def join(self, other: Context) -> None:
        """Take the sequences of another context of the same model behind its own; the other is
        used up. Both were opened by `Model.open_batch`."""
        ...

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, at least one, in this order; the others' memory is given back."""
        ...

    def memory(self, sequence: int) -> Memory:
        """What another sequence that begins alike may be opened with."""
        ...


def feed(context: Context, tokens: Sequence[Sequence[int]], taps: Sequence[str] = ()) -> Scores:
    """Let a context see committed tokens, one list per sequence, some of which may be empty but not
    all. Rows of the result behind a sequence's own tokens mean nothing."""
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
        ...

    @property
    def max_length(self) -> int | None:
        """Longest committed sequence in tokens, prompt included; None where there is no limit."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        ...

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The committed tokens before the first generated one: the prompt of a decoder-only model,
        the decoder's start token of an encoder-decoder model. Never empty."""
        ...

    def open(self, prompt: Sequence[int], kept: Kept | None = None) -> Context:
        """A context that has seen nothing of `prefix(prompt)` but what `kept` is of.

        An encoder-decoder model has its source and encodes it with the first pass. kept: of the
        prompt's beginning, from a context's `memory`. Raises PromptError for a prompt that is empty
        or longer than `max_length`.
        """
        ...

    @property
    def batches(self) -> bool:
        """Whether sequences of different lengths can go through one pass; see `open_batch`."""
        ...

    def open_batch(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Kept | None] = ()
    ) -> Context:
        """A context of several sequences, each as in `open`, which others may join. kept: one entry
        per sequence, or none at all.

        Raises PromptError as `open` does, and OptionError for models that cannot.
        """
        ...


class TargetModel(Model, Protocol):
    """What a target lends to drafters that read its hidden states: its embedding and its head,
    with whatever scale, cap or tie the family has."""

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        ...

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden states."""
        ...

    @property
    def layers(self) -> int:
        """How many layers put out a hidden state: `after(0)` to `after(layers - 1)`."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width), what the first layer is given."""
        ...

    def head(self, states: mx.array) -> mx.array:
        """(batch, m, width), as the hidden state FINAL is -> logits (batch, m, vocabulary)."""
        ...
