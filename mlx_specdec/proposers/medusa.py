"""The proposer with Medusa heads on the target's last hidden state, one head per draft position
(Cai et al., arXiv 2401.10774, section 2.1.1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from ..interfaces import FINAL, Noise, Proposal, Proposer, Scores, no_proposal
from ..models.drafters.medusa import MedusaHeads
from ..sampling.distribution import Distribution
from ..sampling.settings import Sampling
from .draft_model import draw
from .drafter import MOST_DRAFTED, Drafter, LoadedPair

MISSING = (
    "there are no Medusa heads to propose: give a model whose config.json has medusa_num_heads"
)


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.heads is None:
        return None
    heads = pair.heads
    return Drafter(
        "medusa",
        lambda setup: Medusa(heads, setup.sampling, pair.vocabulary, pair.target.prefix),
        most=min(heads.count, MOST_DRAFTED),
        nbytes=heads.nbytes,
    )


@dataclass(eq=False)
class Medusa(Proposer):
    """A proposer that drafts from the hidden state which predicted the newest committed token.
    `settings`, `vocabulary` and `prefix` are the target's, since q must be filtered like p."""

    heads: MedusaHeads
    settings: Sampling
    vocabulary: int
    prefix: Callable[[Sequence[int]], list[int]] = list

    taps = (FINAL,)
    batches = True

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        settings = self.settings, self.vocabulary
        self._distributions = [
            Distribution(*settings, prompt, prefix_length=len(self.prefix(prompt)))
            for prompt in prompts
        ]
        self._states: list[mx.array | None] = [None] * len(prompts)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Drafts at most one token per head, and abstains before the target has
        processed a token. Draft tokens influence later heads only through penalties."""
        some = next((state for state in self._states if state is not None), None)
        if some is None:
            return no_proposal(len(committed))
        states = [mx.zeros_like(some) if state is None else state for state in self._states]
        count = min(limit, self.heads.count)
        logits = self.heads.logits(mx.concatenate(states), count)
        rows = iter(mx.split(logits, count, axis=1))
        drawn = draw(
            self._distributions, committed, noise, count, next(rows), lambda token: next(rows)
        )
        return replace(drawn, counts=tuple(0 if s is None else count for s in self._states))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Keep the hidden states that predicted the newest committed tokens."""
        for row, (processed, results) in enumerate(zip(tokens, scores, strict=True)):
            if processed:
                self._states[row] = results.hidden[FINAL][:, -1:]

    def join(self, other: Self) -> None:
        self._distributions += other._distributions
        self._states += other._states

    def filter(self, keep: Sequence[int]) -> None:
        self._distributions = [self._distributions[row] for row in keep]
        self._states = [self._states[row] for row in keep]
