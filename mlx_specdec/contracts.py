"""The three interfaces that carry everything, and the frozen results that pass between them.

Models, drafting, verification and decoding all import this module and never one another.

A batch is several sequences that go through one pass together. Arrays carry a leading batch axis;
what differs from sequence to sequence and is known on the host comes as one entry per sequence.
A single sequence is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self

import mlx.core as mx

from .kept import Kept, Memory

Progress = Callable[[int, int], None]
"""Called with (done, total) units of long work, first with done = 0 and last with done = total."""


def ignore_progress(done: int, total: int) -> None:
    """A Progress that tells nobody."""


FINAL = "final"
"""The hidden state that the output head is given."""


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
    counts: how many tokens each sequence proposed; the rest of its row only fills the rectangle.
        None means that every sequence proposed all of its row.
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


class Noise(Protocol):
    """The randomness of one round. Index 0 is the first position that the round may emit.

    Every method returns None at temperature 0, where nothing is drawn and nothing is computed.
    """

    def draft(self, index: int) -> mx.array | None:
        """(batch, 1, vocabulary) float32 Gumbel noise that draws drafted token `index`."""
        ...

    def target(self, count: int) -> mx.array | None:
        """(batch, count, vocabulary) float32 Gumbel noise for the target's own choices."""
        ...

    def accept(self, count: int) -> mx.array | None:
        """(batch, count) float32 uniforms in [0, 1) for accepting drafted tokens 0 .. count - 1."""
        ...

    def correction(self) -> mx.array | None:
        """(batch, vocabulary) float32 Gumbel noise that draws the correction or bonus token."""
        ...

    def of(self, sequence: int) -> Noise:
        """That of one sequence alone."""
        ...


class NoiseSource(Protocol):
    """Hands out the noise of one sequence, one round at a time."""

    def at(self, round: int, position: int) -> Noise:
        """Noise of round `round`, whose first emitted position is `position`, both from 0.

        Positions count generated tokens and never go back.
        """
        ...


@dataclass(frozen=True)
class Prices:
    """rounds: seconds of a round by drafted length, 0 being a plain step. token: seconds that a
    token is worth."""

    rounds: Sequence[float]
    token: float


class Proposer(Protocol):
    """Guesses tokens. It never sees target probabilities of positions that it has yet to draft.

    A class that inherits from this Protocol has to say `propose` alone.
    """

    taps: tuple[str, ...] = ()
    """The target's hidden states that `observe` needs, by name; mostly none."""
    batches: bool = False
    """Whether it drafts for several sequences, and has `join` and `filter`. Of one that does not,
    every sequence of a batch has its own."""
    wanted: bool = True
    """Whether a draft is wanted as soon as the prompts are read. One that is not puts off whatever
    only drafts need: they may never be wanted."""
    prices: Callable[[], Prices | None] | None = None
    """What rounds cost so far, for those that know how much of a draft is worth verifying; None
    where its length is not to be changed."""
    needs: tuple[str, ...] = ()
    """What has to be recalled of all tokens that the target does not read again, by name."""

    def recall(self, lengths: Sequence[int], kept: Sequence[Mapping[str, Kept]]) -> None:
        """Told before `begin`, per sequence: the target does not read its first `length` tokens
        again, so that `observe` is not told of them, and what was kept of as many or fewer."""
        return None

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """New sequences start, one per prompt; of an encoder-decoder model it is the source."""
        return None

    def memories(self, sequence: int) -> Mapping[str, Memory]:
        """What another sequence that begins alike may recall, by name."""
        return {}

    def join(self, other: Self) -> None:
        """Take the sequences of another one behind its own; the other is used up."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, at least one, in this order."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether `propose` would draft anything now. Asked while a plain step is in flight, so it
        costs next to nothing and drafts nothing."""
        return True

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """At most `limit` tokens (limit >= 1) that may follow each sequence, without blocking.

        committed: all committed tokens, one list per sequence.
        """
        ...

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """What the target has seen since the last call: a piece of the prompt, or a round's tokens.

        tokens: per sequence, those that stayed, all of them committed. scores: per sequence, the
        target's rows of just these tokens, lazy. Called after every pass over the prompt and after
        every round but the one that ended the sequence; the newest committed token was not seen.
        """
        return None


class Rule(Protocol):
    """Decides which drafted tokens stay and which token follows them."""

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """log_p: (batch, n + 1, vocabulary), the target's log-probabilities up to a constant per
        row, after bias, penalties and filters; row i is about the position that
        proposal.tokens[:, i] fills, and the last row about the bonus token. float32 at
        temperature > 0."""
        ...
