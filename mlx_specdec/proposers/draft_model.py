"""Tokens that are drawn one after the other, each from what the ones before it led to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..interfaces import Context, Model, Noise, Proposal, Proposer, Scores, feed, no_proposal
from ..interfaces.reusable import Cached, Reusable
from ..sampling.choices import choose
from ..sampling.distribution import Distribution, last_rows, log_probabilities_of
from ..sampling.settings import Sampling
from ..text.vocabulary import Translation
from .drafter import Drafter, LoadedPair, Setup


def draw(
    distributions: Sequence[Distribution],
    committed: Sequence[Sequence[int]],
    noise: Noise,
    count: int,
    logits: mx.array,
    following: Callable[[mx.array], mx.array],
) -> Proposal:
    """`count` tokens, at least 1, for every sequence: greedy at temperature 0, else drawn with the
    round's draft noise. Submitted as they are drawn, and not waited for.

    distributions: of the sequences, since p and q must be filtered alike. logits: (batch, 1,
    vocabulary) of the first token. following: those of the next one, behind the newest, (batch, 1)
    int32.
    """
    drafted: list[mx.array] = []
    rows: list[mx.array] = []
    for index in range(count):
        before = mx.concatenate(drafted, axis=1) if drafted else None
        rows.append(log_probabilities_of(distributions, logits, committed, before))
        drafted.append(choose(rows[-1], noise.draft(index)))
        mx.async_eval(drafted[-1])
        if index + 1 < count:
            logits = following(drafted[-1])
    sampled = any(each.samples for each in distributions)
    return Proposal(
        mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
    )


NAME = "draft"
CATCH_UP = 4
"""Unseen tokens of a sequence, beyond which those of a batch are read before the newest."""
CHUNK = 512
"""Of these, in one pass."""
MISSING = "there is no draft model to propose: name one with draft-model"


def drafter(pair: LoadedPair) -> Drafter | None:
    """Of a pair with a draft model."""
    if pair.draft is None:
        return None
    model, translation = pair.draft, pair.translation

    def make(setup: Setup) -> DraftModel:
        sampling = setup.options.sampling
        return DraftModel(model, sampling, pair.vocabulary, translation, eager=setup.eager)

    return Drafter(
        NAME,
        make,
        nbytes=model.nbytes,
        identity=pair.draft_name or "",
    )


class DraftModel(Proposer):
    """Proposer that decodes ahead with a draft model, one token a pass, without blocking.

    model: the draft. settings: the target's own, since p and q must be filtered alike.
    vocabulary: the target's size; ids that the draft does not have get probability zero.
    translation: for a draft whose ids mean other tokens than the target's. eager: see Setup.
    """

    batches = True

    def __init__(
        self,
        model: Model,
        settings: Sampling,
        vocabulary: int,
        translation: Translation | None = None,
        *,
        eager: bool = True,
    ) -> None:
        self._model = model
        self._settings = settings
        self._vocabulary = vocabulary
        self._translation = translation
        self._eager = eager
        self._distributions: list[Distribution] = []
        self._context: Context | None = None
        self._unopened: list[tuple[Sequence[int], Cached | None]] = []
        self._reads: list[bool] = []
        self._unread: list[int] = []
        self._seen: list[int] = []
        self._recalled: tuple[Sequence[int], Sequence[Cached | None]] | None = None

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """As contracts.Proposer says. Tokens that are not cached are caught up with when a draft is
        wanted."""
        self._recalled = lengths, [each.get(NAME) for each in cached]

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Opens the draft's own context where a draft is wanted at once, else with the first one.
        A prompt that alone is more than the draft takes is not read: its first token stands
        there."""
        self._distributions = [
            Distribution(self._settings, self._vocabulary, prompt) for prompt in prompts
        ]
        nothing = [0] * len(prompts), [None] * len(prompts)
        seen, kept = nothing if self._recalled is None else self._recalled
        self._recalled = None
        self._seen = list(seen)
        self._unread = [len(self._model.prefix(prompt)) - 1 for prompt in prompts]
        self._reads = [self._room(len(prompt)) > 0 for prompt in prompts]
        self._context = None
        self._unopened = [
            (prompt, its) if reads else (prompt[:1], None)
            for prompt, reads, its in zip(prompts, self._reads, kept, strict=True)
        ]
        if self._eager:
            self._open().evaluate()

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether a text still fits into the draft's positions."""
        return any(self._rooms(committed))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Greedy at temperature 0, else drawn with the round's draft noise. Abstains where a text
        has outgrown the draft's positions."""
        rooms = self._rooms(committed)
        limit = min([limit, *(room for room in rooms if room > 0)])
        if not any(rooms):
            return no_proposal(len(committed))
        context = self._open()
        logits = self._read(context, committed, rooms)

        def following(tokens: mx.array) -> mx.array:
            fed = tokens if self._translation is None else self._translation.feed_array(tokens)
            return self._own(context.advance(fed, proposed=1).logits)

        own = self._own(logits)
        drawn = draw(self._distributions, committed, noise, limit, own, following)
        return replace(drawn, counts=tuple(limit if room > 0 else 0 for room in rooms))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Reads the prompts along, and takes back what the target did not keep."""
        before = self._seen
        self._seen = [seen + len(kept) for seen, kept in zip(before, tokens, strict=True)]
        if self._context is None:
            return
        if all(seen <= unread for seen, unread in zip(self._seen, self._unread, strict=True)):
            along = zip(tokens, before, self._context.lengths, self._reads, strict=True)
            known = [self._known(t) if r and seen == own else [] for t, seen, own, r in along]
            if any(known):
                feed(self._context, known)
                self._context.evaluate()
        else:
            lengths = self._context.lengths
            self._context.rewind(tuple(map(min, lengths, self._seen[: len(lengths)])))

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """As contracts.Proposer says, up to what the target was told to have seen."""
        opened = () if self._context is None else self._context.lengths
        if self._context is None or sequence >= len(opened) or not self._reads[sequence]:
            return {}
        own = self._context.reusable(sequence)
        return {NAME: replace(own, length=min(own.length, self._seen[sequence]))}

    def join(self, other: DraftModel) -> None:
        """As contracts.Proposer says."""
        if other._context is not None:
            self._open_with(other._context)
        self._unopened += other._unopened
        self._distributions += other._distributions
        self._reads += other._reads
        self._unread += other._unread
        self._seen += other._seen

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        opened = 0 if self._context is None else len(self._context.lengths)
        self._unopened = [self._unopened[row - opened] for row in keep if row >= opened]
        kept = [row for row in keep if row < opened]
        if self._context is not None and kept:
            self._context.filter(kept)
        else:
            self._context = None
        self._distributions = [self._distributions[row] for row in keep]
        self._reads = [self._reads[row] for row in keep]
        self._unread = [self._unread[row] for row in keep]
        self._seen = [self._seen[row] for row in keep]

    def _open(self) -> Context:
        """The context of all sequences, those included that nobody has drafted for yet."""
        if self._unopened:
            prompts = [self._known(prompt) for prompt, _ in self._unopened]
            kept = [each for _, each in self._unopened]
            self._unopened = []
            one = len(prompts) == 1
            model = self._model
            context = model.open(prompts[0], *kept) if one else model.open_batch(prompts, kept)
            self._open_with(context)
        assert self._context is not None, "a sequence has begun"
        return self._context

    def _open_with(self, context: Context) -> None:
        """Take a context of further sequences behind the own ones."""
        if self._unopened:
            self._open()
        if self._context is None:
            self._context = context
        else:
            self._context.join(context)

    def _read(self, context: Context, texts: Sequence[Sequence[int]], rooms: list[int]) -> mx.array:
        """Feed what the draft has not seen of the texts that it has room for; returns its logits
        about their next tokens, (batch, 1, vocabulary)."""
        lengths = context.lengths
        unseen = [
            self._known(text[length:]) if room > 0 else []
            for text, length, room in zip(texts, lengths, rooms, strict=True)
        ]
        if max(map(len, unseen)) > (CATCH_UP if len(texts) > 1 else CHUNK):
            # Of a long rectangle nobody wants the logits.
            for start in range(0, max(map(len, unseen)) - 1, CHUNK):
                feed(context, [tokens[:-1][start : start + CHUNK] for tokens in unseen])
                context.evaluate()
            unseen = [tokens[-1:] for tokens in unseen]
        logits = feed(context, unseen).logits
        if len(set(map(len, unseen))) == 1:
            return last_rows(logits, 1)
        last = mx.array([max(0, len(tokens) - 1) for tokens in unseen])[:, None, None]
        return mx.take_along_axis(logits, last, axis=1)

    def _rooms(self, committed: Sequence[Sequence[int]]) -> list[int]:
        """How many tokens more of each text the draft has positions for."""
        return [
            max(0, self._room(len(text))) if reads else 0
            for text, reads in zip(committed, self._reads, strict=True)
        ]

    def _room(self, committed: int) -> int:
        longest = self._model.max_length
        return sys.maxsize if longest is None else longest - committed

    def _own(self, logits: mx.array) -> mx.array:
        return logits if self._translation is None else self._translation.rows(logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if self._translation is not None:
            return self._translation.feed(tokens)
        # A token beyond the draft's embedding costs acceptance, never exactness.
        return [token if token < self._model.vocabulary else 0 for token in tokens]
