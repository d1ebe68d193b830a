"""A second, cheaper model proposes.

Its context is fed whatever committed tokens it has not seen yet, so there is no special case for
"everything was accepted".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mlx.core as mx

from ..contracts import Context, Model, Noise, Proposal, Proposer, Scores, no_proposal
from ..sampling.distribution import Distribution, choose, last_rows
from ..sampling.settings import Sampling
from .drafter import Brought, Drafter
from .translation import Translation

MISSING = "there is no draft model to propose: name one with draft-model"


def drafter(pair: Brought) -> Drafter | None:
    """Of a pair with a draft model."""
    if pair.draft is None:
        return None
    model, translation = pair.draft, pair.translation
    return Drafter(
        "draft",
        lambda asked, first: DraftModel(model, asked.sampling, pair.vocabulary, translation),
        nbytes=model.nbytes,
        identity=pair.draft_name or "",
    )


class DraftModel(Proposer):
    """Proposer that decodes ahead with a draft model, one token a pass, without blocking.

    model: the draft. settings: the target's own, since p and q must be filtered alike.
    vocabulary: the target's size; ids that the draft does not have get probability zero.
    translation: for a draft whose ids mean other tokens than the target's.
    """

    def __init__(
        self,
        model: Model,
        settings: Sampling,
        vocabulary: int,
        translation: Translation | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._vocabulary = vocabulary
        self._translation = translation
        self._distribution = Distribution(settings, vocabulary)
        self._context: Context | None = None
        self._unread = 0
        self._seen = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Opens the draft's own context, unless the prompt alone is more than the draft takes."""
        self._distribution = Distribution(self._settings, self._vocabulary, prompt)
        self._context, self._seen = None, 0
        known = self._known(prompt)
        self._unread = len(self._model.prefix(known)) - 1
        if self._room(len(prompt)) > 0:
            self._context = self._model.open(known)
            self._context.evaluate()

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether the text still fits into the draft's positions."""
        return self._context is not None and self._room(len(committed[0])) > 0

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Greedy at temperature 0, else drawn with the round's draft noise. Abstains where the text
        has outgrown the draft's positions."""
        [text] = committed
        limit = min(limit, self._room(len(text)))
        if self._context is None or limit < 1:
            return no_proposal()
        unseen = text[self._context.lengths[0] :]
        fed = mx.array([self._known(unseen)], dtype=mx.int32)
        drafted: list[mx.array] = []
        rows: list[mx.array] = []
        for index in range(limit):
            logits = self._context.advance(fed, proposed=min(index, 1)).logits
            before = mx.concatenate(drafted, axis=1) if drafted else None
            own = self._own(last_rows(logits, 1))
            row = self._distribution.log_probabilities(own, text, before)
            tokens = choose(row, noise.draft(index))
            mx.async_eval(tokens)
            fed = tokens if self._translation is None else self._translation.feed_array(tokens)
            drafted.append(tokens)
            rows.append(row)
        sampled = self._settings.temperature > 0
        return Proposal(
            mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
        )

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Reads the prompt along, and takes back what the target did not keep."""
        [kept] = tokens
        self._seen += len(kept)
        if self._context is None:
            return
        if self._seen <= self._unread:
            self._context.advance(mx.array([self._known(kept)], dtype=mx.int32))
            self._context.evaluate()
        else:
            self._context.rewind((min(self._context.lengths[0], self._seen),))

    def _room(self, committed: int) -> int:
        """How many tokens more the draft has positions for."""
        longest = self._model.max_length
        return sys.maxsize if longest is None else longest - committed

    def _own(self, logits: mx.array) -> mx.array:
        return logits if self._translation is None else self._translation.rows(logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if self._translation is not None:
            return self._translation.feed(tokens)
        # A token beyond the draft's embedding costs acceptance, never exactness.
        return [token if token < self._model.vocabulary else 0 for token in tokens]
