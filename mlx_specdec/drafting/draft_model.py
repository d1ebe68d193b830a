"""A second, cheaper model proposes.

Knows a Model and the law of its text. Its context is fed whatever committed tokens it has not seen
yet, so there is no special case for "everything was accepted".
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..contracts import Context, Model, Noise, Progress, Proposal, Round, Scores
from ..sampling.law import Law, choose, last_rows
from ..sampling.settings import Sampling
from .translation import Translation


class DraftModel:
    """Proposer that decodes ahead with a draft model, one token a pass, without blocking.

    model: the draft. settings: the target's own, since p and q must be filtered alike.
    vocabulary: the target's size; ids that the draft does not have get probability zero.
    translation: for a draft whose ids mean other tokens than the target's.
    """

    taps: tuple[str, ...] = ()

    def __init__(
        self,
        model: Model,
        settings: Sampling,
        vocabulary: int,
        translation: Translation | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._vocabulary = vocabulary
        self._translation = translation
        self._progress = progress
        self._law = Law(settings, vocabulary)
        self._context: Context | None = None

    def begin(self, prompt: Sequence[int], scores: Scores | None) -> None:
        """Opens the draft's own context on the prompt."""
        self._law = Law(self._settings, self._vocabulary)
        self._context = self._model.open(self._known(prompt), self._progress)

    def propose(self, committed: Sequence[int], limit: int, noise: Noise) -> Proposal:
        """Greedy at temperature 0, else drawn with the round's draft noise. Abstains where the text
        has outgrown the draft's positions."""
        context = self._opened()
        limit = self._within_positions(limit, len(committed))
        if limit < 1:
            return Proposal(mx.zeros((1, 0), dtype=mx.int32))
        unseen = committed[context.lengths[0] :]
        fed = mx.array([self._known(unseen)], dtype=mx.int32)
        drafted: list[mx.array] = []
        rows: list[mx.array] = []
        for index in range(limit):
            scores = context.advance(fed, proposed=min(index, 1))
            before = mx.concatenate(drafted, axis=1) if drafted else None
            row = self._law.rows(self._own(last_rows(scores.logits, 1)), committed, before)
            tokens = choose(row, noise.draft(index))
            mx.async_eval(tokens)
            fed = tokens if self._translation is None else self._translation.feed_array(tokens)
            drafted.append(tokens)
            rows.append(row)
        sampled = self._settings.temperature > 0
        return Proposal(
            mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
        )

    def observe(self, round: Round) -> None:
        """Takes back what the target did not keep; the newest committed token was never seen."""
        context = self._opened()
        context.rewind((min(context.lengths[0], round.committed - 1),))

    def _opened(self) -> Context:
        if self._context is None:
            raise RuntimeError("propose and observe come after begin")
        return self._context

    def _within_positions(self, limit: int, committed: int) -> int:
        longest = self._model.max_length
        return limit if longest is None else min(limit, longest - committed)

    def _own(self, logits: mx.array) -> mx.array:
        return logits if self._translation is None else self._translation.rows(logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if self._translation is not None:
            return self._translation.feed(tokens)
        # A token beyond the draft's embedding costs acceptance, never exactness.
        return [token if token < self._model.vocabulary else 0 for token in tokens]
