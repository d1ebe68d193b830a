"""Heads on the target's own hidden state propose: one head for each position ahead.

Knows which hidden row the heads read, and the law that their tokens are drawn from. Knows nothing
of how heads are made, stored or trained. Their tokens are verified as a chain.
Source: Medusa (Cai et al., arXiv 2401.10774, section 2.1.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from ..contracts import Noise, Proposal, Round, Scores
from ..sampling.law import Law, choose
from ..sampling.settings import Sampling

TAP = "final"


class Heads(Protocol):
    """What guesses: head i knows the token i + 2 places after the hidden state's own."""

    @property
    def count(self) -> int:
        """How many heads there are, and so how many tokens a round may draft."""
        ...

    def logits(self, state: mx.array, count: int) -> mx.array:
        """(1, 1, width) -> (1, count, vocabulary), a row for each of the first `count` heads."""
        ...


class Medusa:
    """Proposer that reads the hidden state which predicted the last committed token.

    heads: of the target. settings: the target's own, since p and q must be filtered alike.
    vocabulary: the target's size; ids that the heads do not have get probability zero.
    """

    taps: tuple[str, ...] = (TAP,)

    def __init__(self, heads: Heads, settings: Sampling, vocabulary: int) -> None:
        self._heads = heads
        self._settings = settings
        self._vocabulary = vocabulary
        self._law = Law(settings, vocabulary)
        self._state: mx.array | None = None

    def begin(self, prompt: Sequence[int], scores: Scores | None) -> None:
        """Forgets the last text; `scores` hold the state that predicts the first token."""
        self._law = Law(self._settings, self._vocabulary)
        self._state = None if scores is None else scores.hidden[TAP][:, -1:]

    def propose(self, committed: Sequence[int], limit: int, noise: Noise) -> Proposal:
        """At most one token a head: greedy at temperature 0, else drawn with the round's draft
        noise. What one head chose changes the next one's row through penalties alone."""
        if self._state is None:
            raise RuntimeError("propose comes after begin, which needs the target's hidden state")
        count = min(limit, self._heads.count)
        logits = self._heads.logits(self._state, count)
        drafted: list[mx.array] = []
        rows: list[mx.array] = []
        for index in range(count):
            before = mx.concatenate(drafted, axis=1) if drafted else None
            rows.append(self._law.rows(logits[:, index : index + 1], committed, before))
            drafted.append(choose(rows[-1], noise.draft(index)))
        sampled = self._settings.temperature > 0
        return Proposal(
            mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
        )

    def observe(self, round: Round) -> None:
        """Keeps the row that predicted the newest committed token."""
        states = round.scores.hidden[TAP]
        row = states.shape[1] - 1 - round.proposal.size + round.accepted
        self._state = states[:, row : row + 1]
