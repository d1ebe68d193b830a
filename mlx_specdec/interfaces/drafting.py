"""Who guesses and who decides, and the randomness that both use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx

from .results import Proposal, Scores, Verdict
from .reusable import Kept, Memory


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
        """Return whether `propose` would draft anything now. Called while a plain step is in
        flight, so that it must cost next to nothing; it changes no later answer."""
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
        temperature > 0. The proposal is that of `Proposal.for_rules`: ids that the target does not
        have are never accepted."""
        ...
