"""Accept with a given probability instead of verifying: for measuring the loop, never for text.

Does the arithmetic of `coupled` but for the comparison, so that a round costs what it costs there.
"""

from __future__ import annotations

import random

import mlx.core as mx

from ..contracts import Noise, Proposal, Verdict
from ..sampling.choices import choose
from .chain import leading, row_after


class ForcedAcceptance:
    """Each drafted token stays with the same probability, while those before it stay.

    probability: 0 .. 1. seed: of the rule's own generator; the same calls in the same order accept
    the same tokens. What follows the kept tokens is the target's own choice.
    """

    def __init__(self, probability: float, seed: int) -> None:
        self._probability = probability
        self._random = random.Random(seed)

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """As contracts.Rule says, except that the proposal's tokens are not looked at."""
        gumbel = noise.target(proposal.size + 1)
        scored = log_p if gumbel is None else log_p + gumbel
        choice = choose(scored, None)
        if proposal.size == 0:
            nothing = mx.zeros(proposal.tokens.shape, dtype=mx.bool_)
            return Verdict(nothing, choice.squeeze(1), scored)
        stays = [self._random.random() < self._probability for _ in range(proposal.size)]
        kept = leading(mx.array([stays]))
        return Verdict(kept, row_after(choice, kept), scored)
