"""Predicts the speedup of a pair from the costs of its passes and its acceptance rates.

S(gamma) is the speedup over plain decoding of rounds with gamma draft tokens:

    S(gamma) = (1 + a_1 + .. + a_gamma) / (gamma c + V(gamma + 1) + o)

All costs are in plain steps of the target. The formula is from Leviathan et al. (arXiv 2211.17192,
section 3), with a measured V in the place of 1. a_i is the probability that the first i draft
tokens are all accepted. It is alpha ** i if every token has the acceptance probability alpha."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True)
class RoundCost:
    """The costs of the parts of a round, in plain steps of the target.

    Attributes:
        draft: The cost of one draft step (c).
        passes: The cost of a pass of the target, by the number of its tokens (V).
        start: The cost of a round that belongs to neither model (o).
    """

    draft: float
    passes: Mapping[int, float]
    start: float = 0.0

    def pass_over(self, tokens: int) -> float:
        """Return V, interpolated linearly between the measured numbers of tokens."""
        sizes = sorted(self.passes)
        return float(np.interp(tokens, sizes, [self.passes[size] for size in sizes]))

    def of(self, acceptance: Sequence[float]) -> float:
        """Return the expected cost of a round with one draft token for each a_i. It is 1, the cost
        of a plain step, without draft tokens."""
        gamma = len(acceptance)
        if not gamma:
            return 1.0
        return gamma * self.draft + self.pass_over(gamma + 1) + self.start


def speedups(
    cost: RoundCost, acceptance: Sequence[float], lengths: Sequence[int] = ()
) -> tuple[float, ...]:
    """Return S(gamma) for gamma = 0 .. len(acceptance). The first entry is 1. `lengths` are the
    numbers of tokens of the sequences, whose last rounds are cut short. Without them, the sequences
    are taken to be endless."""
    tokens = list(accumulate(acceptance, initial=1.0))
    if lengths:
        for gamma in range(1, len(tokens)):
            rounds = expected_rounds(acceptance[:gamma], max(lengths))
            tokens[gamma] = sum(lengths) / sum(rounds[length] for length in lengths)
    return tuple(
        count / max(cost.of(acceptance[:gamma]), 1e-12) for gamma, count in enumerate(tokens)
    )


def expected_rounds(acceptance: Sequence[float], longest: int) -> list[float]:
    """Return the expected number of rounds of a sequence of n tokens, for n = 0 .. longest. A round
    emits k + 1 tokens with probability a_k - a_(k + 1); a_0 is 1."""
    shares = [1.0, *acceptance, 0.0]
    emits = [shares[count] - shares[count + 1] for count in range(len(acceptance) + 1)]
    rounds = [0.0]
    for length in range(1, longest + 1):
        after = (chance * rounds[max(0, length - k - 1)] for k, chance in enumerate(emits))
        rounds.append(1.0 + sum(after))
    return rounds
