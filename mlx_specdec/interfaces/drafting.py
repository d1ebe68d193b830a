"""Proposers, rules, and the noise that both use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx

from .results import Proposal, Scores, Verdict
from .reusable import Cached, Reusable


class Noise(Protocol):
    """The randomness of one round. Index 0 is the first position that the round may emit.

    Every method returns None at temperature 0, where nothing is drawn and nothing is computed.
    """

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
        """Return the noise of a round. position: of the first token that it emits, from 0.

        Positions count generated tokens and never go back.
        """


@dataclass(frozen=True)
class Prices:
    """The costs of rounds. rounds: seconds of a round by drafted length, 0 being a plain step.
    token: seconds that a token is worth."""

    rounds: Sequence[float]
    token: float


class Proposer(Protocol):
    """Drafts tokens. It never sees target probabilities of positions that it has yet to draft.

    A class that inherits from this Protocol only has to define `propose`.
    """

    taps: tuple[str, ...] = ()
    """Names of the target's hidden states that `observe` needs; mostly none."""
    batches: bool = False
    """Whether it drafts for several sequences, and has `join` and `filter`. Where it does not, each
    sequence of a batch has a proposer of its own."""
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

        committed: all committed tokens, one list per sequence.
        """

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Take in what the target has seen since the last call: a piece of the prompt, or a round.

        tokens: per sequence, all of them committed. scores: per sequence, the target's rows of
        just these tokens, lazy. Called after every pass over the prompt and after every round but
        the one that ended the sequence; the newest committed token was not seen.
        """
        return None


class Rule(Protocol):
    """Decides which drafted tokens are accepted and which token follows them."""

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """Verify a proposal.

        log_p: (batch, n + 1, vocabulary), the target's log-probabilities up to a constant per
        row, after bias, penalties and filters; row i is about the position that
        proposal.tokens[:, i] fills, and the last row about the bonus token. float32 at
        temperature > 0. The proposal is that of `Proposal.for_rules`: ids that the target does not
        have are never accepted."""
