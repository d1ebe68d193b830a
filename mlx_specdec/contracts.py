"""The three interfaces that carry everything, and the frozen results that pass between them.

Knows shapes and promises. Knows nothing of how a model, a proposer or a rule does its work: models,
drafting, verification and decoding all import this module and never one another.

Arrays carry a leading batch axis; today it has length 1 and a longer one is refused by name where a
model opens a context. `lengths` is a tuple with one entry per sequence for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

Progress = Callable[[int, int], None]
"""Called with (done, total) units of long work, first with done = 0 and last with done = total."""


@dataclass(frozen=True)
class Scores:
    """What one pass of a model yields, lazily: what nobody reads is not computed.

    logits: (batch, rows, vocabulary) in the model's dtype; row i is about the token after input i.
    hidden: per tap asked for, (batch, rows, width) in the model's dtype.
    """

    logits: mx.array
    hidden: Mapping[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens of one round; zero tokens mean that the proposer abstains.

    tokens: (batch, n) int32, on the device.
    rows: (batch, n, vocabulary) float32, log q up to a constant per row: the law that each token
        was really drawn from. None means one-hot: all its probability lay on its token.
    source: who drafted, where several may.
    """

    tokens: mx.array
    rows: mx.array | None = None
    source: str = ""

    @property
    def size(self) -> int:
        """How many tokens were drafted."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one proposal, on the device.

    kept: (batch, n) bool, the proposal's rows that stay; in a chain always a prefix.
    next: (batch,) int32, the token that follows the kept ones: correction or bonus.
    scored: (batch, n + 1, vocabulary), log p + g of the target's rows where its choice is their
        argmax (statistics want to know by how much), or None.
    """

    kept: mx.array
    next: mx.array
    scored: mx.array | None = None


@dataclass(frozen=True)
class Round:
    """One finished round, as a proposer may look back on it.

    committed: how many tokens are committed now, prompt included.
    accepted: how many of the proposal's tokens stayed.
    scores: the target's rows of the committed tokens of this round, lazy.
    """

    proposal: Proposal
    verdict: Verdict
    scores: Scores
    accepted: int
    committed: int


class Context(Protocol):
    """One sequence's state in one model: encoder memory where there is one, and the KV cache."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen per sequence, rewound ones not counted."""
        ...

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """See more tokens.

        tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
        proposed: how many of the last tokens are not committed and may be taken back by `rewind`.
            A pass with proposed = 0 makes everything before it final.
        taps: names of hidden states to return; "final" is what the output head is given.
        """
        ...

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Forget all but the first `lengths` tokens; what stays is committed from here on.

        Raises RewindError where `lengths` is longer than what was seen, or shorter than what the
        caller declared as final. Never silently does less than was asked.
        """
        ...


class Model(Protocol):
    """A loaded model: shared weights from which contexts are opened."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest committed text in tokens, prompt included; None where there is no hard limit."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        ...

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The committed tokens before the first generated one: the prompt of a decoder-only model,
        the decoder's start token of an encoder-decoder model. Never empty."""
        ...

    def open(self, prompt: Sequence[int], progress: Progress | None = None) -> Context:
        """A context that has seen everything but the last token of `prefix(prompt)`.

        Long prompts go in steps and report to `progress`. Raises PromptError for a prompt that is
        empty or longer than `max_length`.
        """
        ...


class Noise(Protocol):
    """The randomness of one round. Index 0 is the first position that the round may emit.

    Every method returns None at temperature 0, where nothing is drawn and nothing is computed.
    """

    def draft(self, index: int) -> mx.array | None:
        """(vocabulary,) float32 Gumbel noise that draws drafted token `index`."""
        ...

    def target(self, count: int) -> mx.array | None:
        """(1, count, vocabulary) float32 Gumbel noise for the target's own choices."""
        ...

    def accept(self, count: int) -> mx.array | None:
        """(1, count) float32 uniforms in [0, 1) for accepting drafted tokens 0 .. count - 1."""
        ...

    def correction(self) -> mx.array | None:
        """(1, vocabulary) float32 Gumbel noise that draws the correction or bonus token."""
        ...


class NoiseSource(Protocol):
    """Hands out one round's noise at a time."""

    def at(self, round: int, position: int) -> Noise:
        """Noise of round `round`, whose first emitted position is `position`, both from 0.

        Positions count generated tokens and never go back.
        """
        ...


class Proposer(Protocol):
    """Guesses tokens. It never sees target probabilities of positions that it has yet to draft."""

    @property
    def taps(self) -> tuple[str, ...]:
        """The target's hidden states that `begin` and `observe` need; mostly none."""
        ...

    def begin(self, prompt: Sequence[int], scores: Scores | None) -> None:
        """A new text starts. `prompt` is the source text for encoder-decoder models; `scores` are
        the target's rows of the prompt's last token where taps were asked for, else None."""
        ...

    def propose(self, committed: Sequence[int], limit: int, noise: Noise) -> Proposal:
        """At most `limit` tokens (limit >= 1) that may follow `committed`, without blocking."""
        ...

    def observe(self, round: Round) -> None:
        """What became of the last round; a plain step is a round with an empty proposal.

        Called once after every round, except the one that ended the text.
        """
        ...


class Rule(Protocol):
    """Decides which drafted tokens stay and which token follows them."""

    def judge(self, law: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """law: (batch, n + 1, vocabulary), the target's log p up to a constant per row, after bias,
        penalties and filters; row i is the law of the position that proposal.tokens[:, i] fills,
        and the last row that of the bonus token. float32 at temperature > 0."""
        ...
