"""The proposer with Medusa heads on the target's last hidden state, one head per draft position
(Cai et al., arXiv 2401.10774, section 2.1.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..core.proposer import Proposer
from ..core.row import Row
from ..models.drafters.medusa import MedusaHeads
from ..types import FINAL, Noise, Proposal, Scores, no_proposal
from .draft_model import draw

NAME = "medusa"


@dataclass(eq=False)
class Medusa(Proposer):
    """A proposer that drafts from the hidden state which predicted the newest committed token. It
    keeps this state of each row."""

    heads: MedusaHeads

    hidden = (FINAL,)

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See Proposer. Drafts at most one token per head, and abstains before the target has
        processed a token. Draft tokens influence later heads only through penalties."""
        known = [row.state.get(NAME) for row in rows]
        some = next((state for state in known if state is not None), None)
        if some is None:
            return no_proposal(len(rows))
        states = [mx.zeros_like(some) if state is None else state for state in known]
        count = min(max(limits), self.heads.count)
        logits = self.heads.logits(mx.concatenate(states), count)
        parts = iter(mx.split(logits, count, axis=1))
        drawn = draw(rows, noise, count, next(parts), lambda token: next(parts))
        counts = [
            0 if state is None else min(count, limit)
            for state, limit in zip(known, limits, strict=True)
        ]
        return replace(drawn, counts=tuple(counts))

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Keep the hidden states that predicted the newest committed tokens."""
        for place, row in enumerate(rows):
            if row.seen:
                row.state[NAME] = scores.of(place, len(row.seen)).hidden[FINAL][:, -1:]
