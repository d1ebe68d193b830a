"""The proposers that read the target's hidden states: a drafter, or Medusa heads with one head per
draft position (Cai et al., arXiv 2401.10774, section 2.1.1).

With a drafter, a draft ends before the first token that is not worth verifying. Only chances that
are known before a token is drawn decide that, which keeps every rule exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx

from ..core.proposer import Aligned, GroupProposer, Prices, Setup, align, side_by_side
from ..core.row import Row
from ..models.drafters.medusa import MedusaHeads
from ..models.drafters.network import MOST_WAITING, DrafterContext, DrafterNetwork
from ..types import FINAL, Cached, Noise, Proposal, Reusable, Scores, no_proposal
from .draft_model import draw

EAGER_FROM = 64
"""Number of waiting hidden states of a row above which an eager drafter processes them."""
LEAST_CHANCE = 0.1
"""Least chance of a token for which the draft is cut. Tokens with a smaller chance are rare. To
look for them, the host waits for the draft, which costs more than to verify them."""


@dataclass(eq=False)
class HiddenStateDrafter(GroupProposer):
    """A proposer that drafts for all rows of a group in the passes that one row needs. Unless its
    setup is eager, up to MOST_WAITING hidden states wait for the next draft."""

    network: DrafterNetwork
    setup: Setup = field(default_factory=Setup)

    def __post_init__(self) -> None:
        self.hidden, self.kind = self.network.hidden, self.network.kind
        # The target returns no hidden states of tokens that come from its prefix cache.
        self.needs = (self.kind,)

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        self._open([row]).restore([parts.get(self.kind)])

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Collect the target's hidden states. If too many wait, process them."""
        counts = [len(row.seen) for row in rows]
        if not any(counts):
            return
        if len(rows) > 1 and not self.network.batched:
            for place, row in enumerate(rows):
                self.observe([row], scores.of(place, counts[place]))
            return
        if new := [place for place, row in enumerate(rows) if self.kind not in row.state]:
            opened = self._open([rows[place] for place in new])
            if scores.encoded:
                opened.attend([scores.encoded[place] for place in new])
        context: DrafterContext = align(rows, self.kind).context
        context.add(mx.concatenate([scores.hidden[name] for name in self.hidden], axis=-1), counts)
        if max(context.waiting) > (EAGER_FROM if self.setup.eager() else MOST_WAITING):
            self._process(context, rows)
            context.evaluate()

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        if self.kind not in row.state:
            return {}
        place: Aligned = row.state[self.kind]
        self._process(place.context, place.rows)
        return {self.kind: place.context.snapshot(place.rows.index(row))}

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See GroupProposer. Abstains until the target has processed a token of every row."""
        count = min(max(limits), self.network.most)
        if not count or not all(row.processed and self.kind in row.state for row in rows):
            return no_proposal(len(rows))
        if len(rows) > 1 and not self.network.batched:
            alone = zip(rows, limits, strict=True)
            made = [self.propose([row], [n], noise.of(at)) for at, (row, n) in enumerate(alone)]
            return side_by_side(made)
        context: DrafterContext = align(rows, self.kind).context
        logits = context.first_logits(self._following(context, rows, 0), count)
        drawn = draw(rows, noise, count, logits, context.next_logits)
        context.rewind(tuple(row.processed for row in rows))
        counts = [min(count, limit) for limit in limits]
        if (prices := self.setup.prices(len(rows))) and (chances := context.chances()) is not None:
            end = worth(chances, counts, prices)
            counts = [min(count, end) for count in counts]
        return drawn.cut(counts)

    def _open(self, rows: list[Row]) -> DrafterContext:
        """Return a new context of these rows."""
        place = Aligned(self.network.open(len(rows)), rows)
        for row in rows:
            row.state[self.kind] = place
        return place.context

    def _process(self, context: DrafterContext, rows: Sequence[Row]) -> None:
        """Process all waiting hidden states but each row's newest, whose next token may not be
        known."""
        context.feed(self._following(context, rows, 1))

    def _following(
        self, context: DrafterContext, rows: Sequence[Row], left: int
    ) -> list[list[int]]:
        """Return the token after each waiting hidden state of each row, without the `left` newest
        states."""
        parts = zip(rows, context.lengths, context.waiting, strict=True)
        return [row.committed[n + 1 : n + 1 + max(0, more - left)] for row, n, more in parts]


def worth(chances: mx.array, counts: Sequence[int], prices: Prices) -> int:
    """Return how many tokens of the drafts to verify, at least one. The chances are read only if
    the costs can make a difference.

    Args:
        chances: (batch, count) float32, the probability of each token's acceptance if all tokens
            before it are accepted.
        counts: The number of draft tokens of each row."""
    count = max(counts)
    wanted = prices.least(count)
    if max(wanted[1:], default=0.0) < LEAST_CHANCE:
        return count
    values: Any = chances.tolist()
    expected = [list(accumulate(row[:n], mul)) for row, n in zip(values, counts, strict=True)]
    means = [sum(row[at] for row in expected if at < len(row)) / len(counts) for at in range(count)]
    return next((at for at in range(1, count) if means[at] < wanted[at]), count)


MEDUSA = "medusa"
"""Name of the proposer with Medusa heads, and of its state of a row."""


@dataclass(eq=False)
class Medusa(GroupProposer):
    """A proposer that drafts from the hidden state which predicted the newest committed token. It
    keeps this state of each row."""

    heads: MedusaHeads

    hidden = (FINAL,)

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See GroupProposer. Drafts at most one token per head, and abstains before the target has
        processed a token. Draft tokens influence later heads only through penalties."""
        known = [row.state.get(MEDUSA) for row in rows]
        some = next((state for state in known if state is not None), None)
        if some is None:
            return no_proposal(len(rows))
        states = [mx.zeros_like(some) if state is None else state for state in known]
        count = min(max(limits), self.heads.count)
        logits = self.heads.logits(mx.concatenate(states), count)
        parts = iter(mx.split(logits, count, axis=1))
        drawn = draw(rows, noise, count, next(parts), lambda token: next(parts))
        limited = zip(known, limits, strict=True)
        counts = [0 if state is None else min(count, limit) for state, limit in limited]
        return replace(drawn, counts=tuple(counts))

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Keep the hidden states that predicted the newest committed tokens."""
        for place, row in enumerate(rows):
            if row.seen:
                row.state[MEDUSA] = scores.of(place, len(row.seen)).hidden[FINAL][:, -1:]
