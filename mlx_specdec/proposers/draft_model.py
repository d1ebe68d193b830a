"""A draft model proposes: it decodes ahead, each token from those before it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from ..interfaces import Context, Model, Noise, Proposal, Proposer, Scores, feed, no_proposal
from ..interfaces.results import Cached, Reusable
from ..sampling.distribution import Distribution, choose, log_probabilities
from ..sampling.settings import Sampling
from ..text.vocabulary import Translation
from .drafter import Drafter, LoadedPair, Setup

NAME = "draft"
CATCH_UP = 4
"""Unseen tokens of a sequence, beyond which those of a batch are read before the newest: the logits
of all but that are of no use."""
MANY = 64
"""The same where a sequence is alone."""
CHUNK = 512
"""Tokens of these in one pass."""
MISSING = "there is no draft model to propose: name one with draft-model"


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.draft is None:
        return None
    model, translation = pair.draft, pair.translation

    def make(setup: Setup) -> DraftModel:
        given = setup.sampling, pair.vocabulary, translation
        return DraftModel(model, *given, eager=setup.eager)

    return Drafter(NAME, make, nbytes=model.nbytes, identity=pair.draft_name or "")


def draw(
    distributions: Sequence[Distribution],
    committed: Sequence[Sequence[int]],
    noise: Noise,
    count: int,
    logits: mx.array,
    following: Callable[[mx.array], mx.array],
) -> Proposal:
    """Draw `count` tokens, at least 1, for every sequence: greedy at temperature 0, otherwise with
    the round's draft noise. Tokens are submitted as they are drawn, without waiting for them.

    distributions: of the sequences, since p and q must be filtered alike. logits: (batch, 1,
    vocabulary) of the first token. following: returns those of the next one for the newest, (batch,
    1) int32."""
    drafted: list[mx.array] = []
    rows: list[mx.array] = []
    for index in range(count):
        before = mx.concatenate(drafted, axis=1) if drafted else None
        rows.append(log_probabilities(distributions, logits, committed, before))
        drafted.append(choose(rows[-1], noise.draft(index)))
        mx.async_eval(drafted[-1])
        if index + 1 < count:
            logits = following(drafted[-1])
    sampled = any(each.settings.temperature > 0 for each in distributions)
    return Proposal(
        mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
    )


@dataclass
class Row:
    """One sequence of a draft model.

    prompt, cached: what its context is opened with. fits: whether the draft has positions for the
    prompt; otherwise the prompt is its first token, and nothing is drafted. unread: tokens of the
    prompt that the target sees before it generates. seen: tokens that the target has seen."""

    distribution: Distribution
    prompt: Sequence[int]
    cached: Cached | None
    fits: bool
    unread: int
    seen: int


@dataclass(eq=False)
class DraftModel(Proposer):
    """Proposer that decodes ahead with a draft model, one token a pass, without blocking.

    settings, vocabulary: the target's own, since p and q must be filtered alike. translation: for a
    draft whose ids mean other tokens than the target's. eager: see Setup."""

    batches = True

    model: Model
    settings: Sampling
    vocabulary: int
    translation: Translation | None = None
    eager: bool = True

    def __post_init__(self) -> None:
        self._rows: list[Row] = []
        # Of the first rows; the others are opened with their first draft.
        self._context: Context | None = None
        self._recalled: list[tuple[int, Cached | None]] = []

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """See Proposer. Tokens of the prompt that are not cached are caught up on with the first
        draft."""
        names = (each.get(NAME) for each in cached)
        self._recalled = list(zip(lengths, names, strict=True))

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Proposer. An eager draft opens its context at once, others with the first draft."""
        recalled = self._recalled or [(0, None)] * len(prompts)
        self._rows = [self._row(*each) for each in zip(prompts, recalled, strict=True)]
        self._context, self._recalled = None, []
        if self.eager:
            self._open().evaluate()

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return any(self._rooms(committed))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Abstains where a text has outgrown the draft's positions."""
        rooms = self._rooms(committed)
        limit = min([limit, *(room for room in rooms if room > 0)])
        if not any(rooms):
            return no_proposal(len(committed))
        context = self._open()
        logits = self._catch_up(context, committed, rooms)

        def following(tokens: mx.array) -> mx.array:
            fed = tokens if self.translation is None else self.translation.feed_array(tokens)
            return self._over_target(context.advance(fed, proposed=1).logits)

        distributions = [row.distribution for row in self._rows]
        drawn = draw(distributions, committed, noise, limit, self._over_target(logits), following)
        return replace(drawn, counts=tuple(limit if room > 0 else 0 for room in rooms))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Read the prompts along with the target, and drop the tokens that it rejected."""
        before = [row.seen for row in self._rows]
        for row, its in zip(self._rows, tokens, strict=True):
            row.seen += len(its)
        if self._context is None:
            return
        lengths = self._context.lengths
        if all(row.seen <= row.unread for row in self._rows):
            along = zip(self._rows, tokens, before, lengths, strict=True)
            known = [
                self._known(its) if row.fits and seen == own else []
                for row, its, seen, own in along
            ]
            if any(known):
                feed(self._context, known)
                self._context.evaluate()
        else:
            both = zip(lengths, self._rows, strict=False)
            self._context.rewind(tuple(min(length, row.seen) for length, row in both))

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """See Proposer; no further than the target has seen."""
        row = self._rows[sequence]
        if self._context is None or sequence >= self._opened or not row.fits:
            return {}
        reusable = self._context.reusable(sequence)
        return {NAME: replace(reusable, length=min(reusable.length, row.seen))}

    def join(self, other: Self) -> None:
        if other._context is not None:
            self._open().join(other._context)
        self._rows += other._rows

    def filter(self, keep: Sequence[int]) -> None:
        opened = [row for row in keep if row < self._opened]
        if self._context is not None and opened:
            self._context.filter(opened)
        else:
            self._context = None
        self._rows = [self._rows[row] for row in keep]

    @property
    def _opened(self) -> int:
        return 0 if self._context is None else len(self._context.lengths)

    def _row(self, prompt: Sequence[int], recalled: tuple[int, Cached | None]) -> Row:
        seen, cached = recalled
        fits = self._room(len(prompt)) > 0
        return Row(
            Distribution(self.settings, self.vocabulary, prompt),
            prompt if fits else prompt[:1],
            cached if fits else None,
            fits,
            unread=len(self.model.prefix(prompt)) - 1,
            seen=seen,
        )

    def _open(self) -> Context:
        """Return the context of all rows, opened now for those that have none."""
        if unopened := self._rows[self._opened :]:
            prompts = [self._known(row.prompt) for row in unopened]
            cached = [row.cached for row in unopened]
            if len(unopened) == 1:
                context = self.model.open(prompts[0], cached[0])
            else:
                context = self.model.open_batch(prompts, cached)
            if self._context is None:
                self._context = context
            else:
                self._context.join(context)
        assert self._context is not None, "a sequence has begun"
        return self._context

    def _catch_up(
        self, context: Context, texts: Sequence[Sequence[int]], rooms: list[int]
    ) -> mx.array:
        """Feed what the draft has not seen of the texts that it has room for; return its logits of
        their next tokens, (batch, 1, vocabulary)."""
        unseen = [
            self._known(text[length:]) if room > 0 else []
            for text, length, room in zip(texts, context.lengths, rooms, strict=True)
        ]
        if max(map(len, unseen)) > (CATCH_UP if len(texts) > 1 else MANY):
            # Nobody wants the logits of a long rectangle.
            for start in range(0, max(map(len, unseen)) - 1, CHUNK):
                feed(context, [tokens[:-1][start : start + CHUNK] for tokens in unseen])
                context.evaluate()
            unseen = [tokens[-1:] for tokens in unseen]
        logits = feed(context, unseen).logits
        if len(set(map(len, unseen))) == 1:
            return logits if logits.shape[1] == 1 else logits[:, -1:]
        last = mx.array([max(0, len(tokens) - 1) for tokens in unseen])[:, None, None]
        return mx.take_along_axis(logits, last, axis=1)

    def _rooms(self, committed: Sequence[Sequence[int]]) -> list[int]:
        """Return for each text how many more tokens the draft has positions for."""
        return [
            max(0, self._room(len(text))) if row.fits else 0
            for text, row in zip(committed, self._rows, strict=True)
        ]

    def _room(self, committed: int) -> int:
        longest = self.model.max_length
        return sys.maxsize if longest is None else longest - committed

    def _over_target(self, logits: mx.array) -> mx.array:
        return logits if self.translation is None else self.translation.rows(logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if self.translation is not None:
            return self.translation.feed(tokens)
        # A token beyond the draft's embedding costs acceptance, never exactness.
        return [token if token < self.model.vocabulary else 0 for token in tokens]
