"""The proposer that decodes ahead with a draft model, token by token."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..core.distribution import choose, log_probabilities
from ..core.proposer import Aligned, GroupProposer, Setup, align
from ..core.row import Row
from ..text.vocabulary import Translation
from ..types import Cached, Context, Model, Noise, Proposal, Reusable, Scores, feed, no_proposal

NAME = "draft"
CACHED = "cached draft"
"""Name of the cached state of a prompt whose context is yet to be opened."""
CATCH_UP = 4
"""Largest backlog, in tokens, that a batch feeds in the pass that drafts. A longer backlog gets
passes of its own, which compute no logits, because only the newest token's logits are used."""
MANY = 64
"""The limit of CATCH_UP for a single sequence, in tokens."""
BACKLOG_CHUNK = 512
"""Tokens per sequence in one pass over a long backlog."""


def draw(
    rows: Sequence[Row],
    noise: Noise,
    count: int,
    logits: mx.array,
    following: Callable[[mx.array], mx.array],
) -> Proposal:
    """Draw `count` tokens for every row without blocking.

    Args:
        count: The draft length, at least 1.
        logits: (batch, 1, vocabulary) for the first token.
        following: Returns the logits after the newest draft tokens, (batch, 1) int32."""
    distributions = [row.drafted_from for row in rows]
    committed = [row.committed for row in rows]
    drafted = [mx.zeros((len(rows), 0), dtype=mx.int32)]
    drawn: list[mx.array] = []
    for index in range(count):
        before = mx.concatenate(drafted, axis=1)
        drawn.append(log_probabilities(distributions, logits, committed, before))
        drafted.append(choose(drawn[-1], noise.draft(index)))
        mx.async_eval(drafted[-1])
        if index + 1 < count:
            logits = following(drafted[-1])
    sampled = any(row.options.temperature > 0 for row in rows)
    log_q = mx.concatenate(drawn, axis=1) if sampled else None
    return Proposal(mx.concatenate(drafted, axis=1), log_q)


@dataclass(eq=False)
class DraftModel(GroupProposer):
    """A proposer that decodes ahead with a draft model, one token per pass, without blocking. It
    abstains while a row is longer than the draft's maximum length.

    Attributes:
        translation: Translates token ids if the draft has another vocabulary than the target.
        setup: If it is not eager, the first draft prefills, and not the target's prefill."""

    model: Model
    translation: Translation | None = None
    setup: Setup = field(default_factory=Setup)

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        return self._free_positions(rows) > 0

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        count = min(max(limits), self._free_positions(rows))
        if count <= 0:
            return no_proposal(len(rows))
        context = self._context(rows)
        logits = self._catch_up(context, rows)

        def following(tokens: mx.array) -> mx.array:
            fed = tokens if self.translation is None else self.translation.feed_array(tokens)
            return self._over_target(context.advance(fed, proposed=1).logits)

        drawn = draw(rows, noise, count, self._over_target(logits), following)
        return replace(drawn, counts=tuple(min(count, limit) for limit in limits))

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Prefill together with the target, and rewind rejected draft tokens."""
        prefills = not rows[0].position
        opened = [row for row in rows if NAME in row.state]
        if prefills and not opened and self.setup.eager() and self._free_positions(rows) > 0:
            self._context(opened := list(rows)).evaluate()
        if not opened:
            return
        context = align(opened, NAME).context
        lengths = context.lengths
        if not prefills:
            context.rewind(tuple(map(min, lengths, [row.processed for row in opened])))
            return
        chunks = [
            self._draft_ids(row.seen) if length == row.processed - len(row.seen) else []
            for row, length in zip(opened, lengths, strict=True)
        ]
        if any(chunks):
            feed(context, chunks)
            context.evaluate()

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        """See GroupProposer. Returns no more positions than the target has processed."""
        if NAME not in row.state:
            return {}
        place: Aligned = row.state[NAME]
        reusable: Reusable = place.context.snapshot(place.rows.index(row))
        return {NAME: replace(reusable, length=min(reusable.length, row.processed))}

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        """See GroupProposer. The first draft prefills prompt tokens that are not cached."""
        row.state[CACHED] = parts.get(NAME)

    def _context(self, rows: Sequence[Row]) -> Context:
        """Return the context of these rows; open it for rows that have none yet."""
        if unopened := [row for row in rows if NAME not in row.state]:
            prompts = [self._draft_ids(row.prompt) for row in unopened]
            cached = [row.state.pop(CACHED, None) for row in unopened]
            opened = Aligned(self.model.open_batch(prompts, cached), unopened)
            for row in unopened:
                row.state[NAME] = opened
        return align(rows, NAME).context

    def _catch_up(self, context: Context, rows: Sequence[Row]) -> mx.array:
        """Run the draft model over the tokens of each row that its KV cache lacks. Return the
        logits of the token after them, (batch, 1, vocabulary)."""
        cached = zip(rows, context.lengths, strict=True)
        backlog = [self._draft_ids(row.committed[length:]) for row, length in cached]
        if max(map(len, backlog)) > (CATCH_UP if len(rows) > 1 else MANY):
            # Only the logits of the newest tokens are needed.
            for start in range(0, max(map(len, backlog)) - 1, BACKLOG_CHUNK):
                feed(context, [tokens[:-1][start : start + BACKLOG_CHUNK] for tokens in backlog])
                context.evaluate()
            backlog = [tokens[-1:] for tokens in backlog]
        logits = feed(context, backlog).logits
        last = mx.array([len(tokens) - 1 for tokens in backlog])[:, None, None]
        return logits if logits.shape[1] == 1 else mx.take_along_axis(logits, last, axis=1)

    def _free_positions(self, rows: Sequence[Row]) -> int:
        """Return the number of positions that the draft has left after the longest row."""
        longest = self.model.max_length
        return sys.maxsize if longest is None else longest - max(len(r.committed) for r in rows)

    def _over_target(self, logits: mx.array) -> mx.array:
        return logits if self.translation is None else self.translation.rows(logits)

    def _draft_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's ids of the target's tokens."""
        if self.translation is not None:
            return self.translation.feed(tokens)
        # Ids beyond the draft's vocabulary become 0, which lowers acceptance but stays exact.
        return [token if token < self.model.vocabulary else 0 for token in tokens]
