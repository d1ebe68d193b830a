"""The Protocols: a model, the state of sequences in it, proposers, rules, and the noise of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

import mlx.core as mx

from .results import Cached, Proposal, Reusable, Scores, Verdict, rectangle


class Context(Protocol):
    """The state of a batch in one model: encoder output where there is one, and the KV cache."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen per sequence, without rewound ones."""

    @property
    def replays(self) -> bool:
        """Whether a rewind into a pass of several tokens costs another pass over some of them."""

    @property
    def checkpoints(self) -> bool:
        """Whether `reusable` gives state of the very tokens seen, which cannot be cut to fewer."""

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """Append tokens and return the scores of their rows.

        tokens: (batch, m) int32, m >= 1; `lengths` grow by m at once, the arithmetic is lazy.
        proposed: how many of the last tokens are not committed and may be taken back by `rewind`.
            A pass with proposed = 0 makes everything before it final.
        taps: names of hidden states to return: FINAL, `after(i)` for the output of layer i, and
            `keys_of(i)` and `values_of(i)`, which few models show.

        Raises OptionError where the model cannot show such a hidden state."""

    def rewind(self, lengths: tuple[int, ...]) -> int:
        """Forget all but the first `lengths` tokens, which are committed from then on, and return
        the number of passes that this took: 1 after a replay, and else 0.

        Raises RewindError where `lengths` is longer than what was seen, or shorter than what the
        caller declared as final. Never silently does less."""

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
        """Return a context that has seen the part of `prefix(prompt)` that is `cached`, from a
        context's `reusable`. An encoder-decoder model encodes its source with the first pass.
        Raises PromptError for a prompt that is empty or longer than `max_length`."""

    @property
    def batches(self) -> bool:
        """Whether sequences of different lengths can go through one pass; see `open_batch`."""

    @property
    def why_not_batched(self) -> str:
        """Why sequences cannot go through one pass, in one line without the model's name; "" if
        they can."""

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = ()
    ) -> Context:
        """Return a context of several sequences, each as in `open`, which others may join. cached:
        one entry per sequence, or none. Raises PromptError, and OptionError for models that cannot.
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


class Noise(Protocol):
    """The randomness of one round, whose first position has index 0. At temperature 0 every method
    but `of` returns None."""

    def draft(self, index: int) -> mx.array | None:
        """(batch, 1, vocabulary) float32 Gumbel noise that draws drafted token `index`."""

    def target(self, count: int) -> mx.array | None:
        """(batch, count, vocabulary) float32 Gumbel noise for the target's own choices."""

    def accept(self, count: int) -> mx.array | None:
        """(batch, count) float32 uniforms in [0, 1) for accepting drafted tokens 0 .. count - 1."""

    def correction(self) -> mx.array | None:
        """(batch, vocabulary) float32 Gumbel noise that draws the correction or bonus token."""

    def of(self, sequence: int) -> Noise:
        """Return the noise of one sequence alone."""


class NoiseSource(Protocol):
    """Makes the noise of one sequence, one round at a time."""

    def at(self, round: int, position: int) -> Noise:
        """Return the noise of a round. position: of its first token, from 0; never goes back."""

    def draw_ahead(self) -> None:
        """Submit what the next round may need, while the device would wait for the host."""
        return None


@dataclass(frozen=True)
class Prices:
    """The costs of rounds. rounds: of a round in plain steps, by drafted length from 0.
    token: plain steps that a token is worth."""

    rounds: Sequence[float]
    token: float

    def worth(self, chances: Sequence[float]) -> int:
        """Return how many tokens bring most for their verification; 0 where none are worth it.
        chances: that all tokens up to each are right; of a batch their means over its rows."""
        brought = accumulate(chances, initial=1.0)
        values = [its * self.token - cost for its, cost in zip(brought, self.rounds, strict=False)]
        best = max(range(len(values)), key=values.__getitem__)
        return best if values[best] > 0 else 0


class Proposer(Protocol):
    """Drafts tokens, and never sees target probabilities of positions that it has yet to draft. A
    class that inherits from this Protocol only has to define `propose`."""

    taps: tuple[str, ...] = ()
    """Names of the target's hidden states that `observe` needs; mostly none."""
    batches: bool = False
    """Whether it drafts for several sequences, and has `join` and `filter`. Where it does not, each
    sequence of a batch has a proposer of its own."""
    chances: Sequence[float] = ()
    """That all tokens up to each of those that it is ready to draft are right, where it knows."""
    needs: tuple[str, ...] = ()
    """Names of what it must recall for all tokens that the target does not read again."""

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """Recall cached prefixes, before `begin`. lengths: how many tokens of each sequence the
        target does not read again, so that `observe` never gets them. cached: what is cached of as
        many tokens or fewer, by name, per sequence."""
        return None

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin new sequences, one per prompt; of an encoder-decoder model it is the source."""
        return None

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """Return what another sequence that begins alike may recall, by name."""
        return {}

    def join(self, other: Self) -> None:
        """Append the sequences of another proposer, which must not be used any more."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, at least one, in this order."""
        raise TypeError(f"{type(self).__name__} drafts for one sequence")

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Return whether `propose` would draft anything now. Called while a plain step is in
        flight, so that it must cost next to nothing; it changes no later answer."""
        return True

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Draft at most `limit` tokens (limit >= 1) after each sequence, without blocking.

        committed: all committed tokens, one list per sequence."""

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Take in what the target has seen since the last call: a piece of the prompt, or a round.

        tokens: per sequence, all of them committed, without the newest one. scores: per sequence,
        the target's rows of just these tokens, lazy. Not called after the round that ended it."""
        return None


class Rule(Protocol):
    """Decides which drafted tokens are accepted and which token follows them."""

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """Verify a proposal.

        log_p: (batch, n + 1, vocabulary), the target's log-probabilities up to a constant per row,
        after bias, penalties and filters; row i is about the position that proposal.tokens[:, i]
        fills, and the last row about the bonus token. float32 at temperature > 0. The proposal is
        that of `Proposal.for_rules`: ids that the target does not have are never accepted."""
