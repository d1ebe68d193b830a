"""The proposer that decodes ahead with a draft model, token by token."""

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
"""Largest backlog, in tokens, that a batch feeds in the pass that drafts. A longer backlog gets
passes of its own, which compute no logits, because only the newest token's logits are used."""
MANY = 64
"""The limit of CATCH_UP for a single sequence, in tokens."""
CHUNK = 512
"""Tokens per sequence in one pass over a long backlog."""
MISSING = "there is no draft model to propose: name one with draft-model"


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.draft is None:
        return None
    model, translation = pair.draft, pair.translation

    def make(setup: Setup) -> DraftModel:
        settings = setup.sampling, pair.vocabulary, translation
        return DraftModel(model, *settings, eager=setup.eager)

    return Drafter(NAME, make, nbytes=model.nbytes, identity=pair.draft_name or "")


def draw(
    distributions: Sequence[Distribution],
    committed: Sequence[Sequence[int]],
    noise: Noise,
    count: int,
    logits: mx.array,
    following: Callable[[mx.array], mx.array],
) -> Proposal:
    """Draw `count` tokens for every sequence without blocking.

    Args:
        distributions: They use the target's settings, since q must be filtered like p.
        count: The draft length, at least 1.
        logits: (batch, 1, vocabulary) for the first token.
        following: Returns the logits after the newest draft tokens, (batch, 1) int32."""
    drafted = [mx.zeros((len(committed), 0), dtype=mx.int32)]
    rows: list[mx.array] = []
    for index in range(count):
        before = mx.concatenate(drafted, axis=1)
        rows.append(log_probabilities(distributions, logits, committed, before))
        drafted.append(choose(rows[-1], noise.draft(index)))
        mx.async_eval(drafted[-1])
        if index + 1 < count:
            logits = following(drafted[-1])
    sampled = any(row.settings.temperature > 0 for row in distributions)
    return Proposal(
        mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
    )


@dataclass
class DraftRow:
    """One sequence of a draft model.

    Attributes:
        prompt: The prompt with which the draft's context is opened.
        cached: Cached state for that context.
        fits: Whether the prompt is shorter than the draft's maximum length. If not, `prompt` is
            only its first token, and nothing is drafted.
        prefill: Number of tokens that the target processes before it generates.
        target_length: Number of tokens that the target has processed."""

    distribution: Distribution
    prompt: Sequence[int]
    cached: Cached | None
    fits: bool
    prefill: int
    target_length: int


@dataclass(eq=False)
class DraftModel(Proposer):
    """A proposer that decodes ahead with a draft model, one token per pass, without blocking.

    Attributes:
        settings: The target's sampling settings, since q must be filtered like p.
        vocabulary: The target's number of token ids.
        translation: Translates token ids if the draft has another vocabulary than the target.
        eager: See Setup."""

    batches = True

    model: Model
    settings: Sampling
    vocabulary: int
    translation: Translation | None = None
    eager: bool = True

    def __post_init__(self) -> None:
        self._rows: list[DraftRow] = []
        # It holds only the first rows. The remaining rows are opened for their first draft.
        self._context: Context | None = None
        self._recalled: list[tuple[int, Cached | None]] = []

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """See Proposer. The first draft prefills prompt tokens that are not cached."""
        states = (row.get(NAME) for row in cached)
        self._recalled = list(zip(lengths, states, strict=True))

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Proposer. Opens a context now if `eager`, and otherwise for the first draft."""
        recalled = self._recalled or [(0, None)] * len(prompts)
        self._rows = [self._row(*row) for row in zip(prompts, recalled, strict=True)]
        self._context, self._recalled = None, []
        if self.eager:
            self._open().evaluate()

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return any(self._free_positions(committed))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Abstains for sequences that have reached the draft's maximum length."""
        free = self._free_positions(committed)
        limit = min([limit, *(positions for positions in free if positions > 0)])
        if not any(free):
            return no_proposal(len(committed))
        context = self._open()
        logits = self._catch_up(context, committed, free)

        def following(tokens: mx.array) -> mx.array:
            fed = tokens if self.translation is None else self.translation.feed_array(tokens)
            return self._over_target(context.advance(fed, proposed=1).logits)

        distributions = [row.distribution for row in self._rows]
        drawn = draw(distributions, committed, noise, limit, self._over_target(logits), following)
        return replace(drawn, counts=tuple(limit if positions > 0 else 0 for positions in free))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Prefill together with the target, and rewind rejected draft tokens."""
        before = [row.target_length for row in self._rows]
        for row, processed in zip(self._rows, tokens, strict=True):
            row.target_length += len(processed)
        if self._context is None:
            return
        lengths = self._context.lengths
        if all(row.target_length <= row.prefill for row in self._rows):
            rows = zip(self._rows, tokens, before, lengths, strict=True)
            chunks = [
                self._draft_ids(processed) if row.fits and length == start else []
                for row, processed, start, length in rows
            ]
            if any(chunks):
                feed(self._context, chunks)
                self._context.evaluate()
        else:
            targets = [row.target_length for row in self._rows]
            self._context.rewind(tuple(map(min, lengths, targets)))

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """See Proposer. Returns no more positions than the target has processed."""
        row = self._rows[sequence]
        if self._context is None or sequence >= self._opened or not row.fits:
            return {}
        reusable = self._context.reusable(sequence)
        return {NAME: replace(reusable, length=min(reusable.length, row.target_length))}

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

    def _row(self, prompt: Sequence[int], recalled: tuple[int, Cached | None]) -> DraftRow:
        length, cached = recalled
        fits = self._positions_after(len(prompt)) > 0
        prefix = len(self.model.prefix(prompt))
        return DraftRow(
            Distribution(self.settings, self.vocabulary, prompt, prefix_length=prefix),
            prompt if fits else prompt[:1],
            cached if fits else None,
            fits,
            prefill=prefix - 1,
            target_length=length,
        )

    def _open(self) -> Context:
        """Return the context of all rows; open it for rows that have none yet."""
        if unopened := self._rows[self._opened :]:
            prompts = [self._draft_ids(row.prompt) for row in unopened]
            cached = [row.cached for row in unopened]
            context = self.model.open_batch(prompts, cached)
            if self._context is None:
                self._context = context
            else:
                self._context.join(context)
        assert self._context is not None, "a sequence has begun"
        return self._context

    def _catch_up(
        self, context: Context, committed: Sequence[Sequence[int]], free: list[int]
    ) -> mx.array:
        """Feed the tokens that are not in the draft's KV cache, and return the logits of the next
        tokens, (batch, 1, vocabulary). Rows without free positions are skipped."""
        backlog = [
            self._draft_ids(tokens[length:]) if positions > 0 else []
            for tokens, length, positions in zip(committed, context.lengths, free, strict=True)
        ]
        if max(map(len, backlog)) > (CATCH_UP if len(committed) > 1 else MANY):
            # Only the logits of the newest tokens are needed.
            for start in range(0, max(map(len, backlog)) - 1, CHUNK):
                feed(context, [tokens[:-1][start : start + CHUNK] for tokens in backlog])
                context.evaluate()
            backlog = [tokens[-1:] for tokens in backlog]
        logits = feed(context, backlog).logits
        if len(set(map(len, backlog))) == 1:
            return logits if logits.shape[1] == 1 else logits[:, -1:]
        last = mx.array([max(0, len(tokens) - 1) for tokens in backlog])[:, None, None]
        return mx.take_along_axis(logits, last, axis=1)

    def _free_positions(self, committed: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of free positions of the draft per sequence."""
        return [
            max(0, self._positions_after(len(tokens))) if row.fits else 0
            for tokens, row in zip(committed, self._rows, strict=True)
        ]

    def _positions_after(self, committed: int) -> int:
        longest = self.model.max_length
        return sys.maxsize if longest is None else longest - committed

    def _over_target(self, logits: mx.array) -> mx.array:
        return logits if self.translation is None else self.translation.rows(logits)

    def _draft_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's ids of the target's tokens."""
        if self.translation is not None:
            return self.translation.feed(tokens)
        # Ids beyond the draft's vocabulary become 0, which lowers acceptance but stays exact.
        return [token if token < self.model.vocabulary else 0 for token in tokens]
