"""S(gamma): how many times as fast as plain decoding rounds of gamma drafted tokens are.

S(gamma) = (1 + a_1 + .. + a_gamma) / (gamma c + V(gamma + 1) + o + r), all costs in plain steps of
the target (Leviathan et al., arXiv 2211.17192, section 3, with a measured V in the place of 1).
a_i is the probability that the first i drafted tokens are all accepted: alpha ** i where each token
has the acceptance probability alpha. Plain numbers only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class RoundCost:
    """What the parts of a round cost, in plain steps. draft: one draft step (c). passes: a pass of
    the target by the number of its tokens (V). start: what every round waits for besides (o).
    replays: what is rejected costs a pass over the tokens that are kept (r)."""

    draft: float
    passes: Mapping[int, float]
    start: float = 0.0
    replays: bool = False

    def of(self, acceptance: Sequence[float]) -> float:
        """A round that drafts one token for each a_i; 1 where there are none, a plain step."""
        gamma = len(acceptance)
        if not gamma:
            return 1.0
        cost = gamma * self.draft + between(self.passes, gamma + 1) + self.start
        if self.replays and acceptance[-1] < 1:
            rejected = 1 - acceptance[-1]
            # Accepted tokens of the rounds in which not all were: sum of i (a_i - a_(i + 1)).
            kept = (sum(acceptance) - gamma * acceptance[-1]) / rejected
            cost += rejected * between(self.passes, round(kept) + 1)
        return cost


def emitted(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens of a round for gamma = 0, 1, .., the target's own token included."""
    return list(accumulate(acceptance, initial=1.0))


def speedups(
    cost: RoundCost, acceptance: Sequence[float], lengths: Sequence[int] = ()
) -> tuple[float, ...]:
    """S(gamma) for gamma = 0 .. len(acceptance), the first being 1. lengths: tokens of the
    sequences, which cut their last rounds short; without them there is no end."""
    tokens = emitted(acceptance)
    if lengths:
        for gamma in range(1, len(tokens)):
            rounds = expected_rounds(acceptance[:gamma], max(lengths))
            tokens[gamma] = sum(lengths) / sum(rounds[length] for length in lengths)
    return tuple(
        each / max(cost.of(acceptance[:gamma]), 1e-12) for gamma, each in enumerate(tokens)
    )


def expected_rounds(acceptance: Sequence[float], longest: int) -> list[float]:
    """Entry n: how many rounds a sequence of n tokens takes, for n = 0 .. longest. A round emits k
    + 1 tokens with probability a_k - a_(k + 1), a_0 being 1."""
    shares = [1.0, *acceptance, 0.0]
    chances = [shares[kept] - shares[kept + 1] for kept in range(len(acceptance) + 1)]
    rounds = [0.0]
    for length in range(1, longest + 1):
        after = (chance * rounds[max(0, length - kept - 1)] for kept, chance in enumerate(chances))
        rounds.append(1.0 + sum(after))
    return rounds


def between(points: Mapping[int, float], place: int) -> float:
    """The value at `place` on the straight lines through the points; the last line goes on."""
    if place in points or len(points) == 1:
        return points.get(place, next(iter(points.values())))
    known = sorted(points)
    at = min(max(1, bisect_left(known, place)), len(known) - 1)
    below, above = known[at - 1], known[at]
    share = (place - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def shared(cost: RoundCost, share: float, network: float) -> RoundCost:
    """What rounds cost the cluster, in its own plain steps, from what they cost one machine."""
    step = share + network
    return RoundCost(
        draft=cost.draft / step,
        passes={m: (share * alone + network) / step for m, alone in cost.passes.items()},
        start=cost.start / step,
        replays=cost.replays,
    )


def break_even(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float | None:
    """The network above which a round of these a_i speeds the cluster up by more than it does one
    machine; None where there is no such network."""
    alone = cost.of(acceptance)
    local, passes = _round(cost, share, acceptance)
    if alone <= passes:
        return None
    return max(0.0, (local - share * alone) / (alone - passes))


def pays_below(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float:
    """The network below which a round of these a_i takes the cluster less time than one machine; of
    a plain step without any."""
    local, passes = _round(cost, share, acceptance)
    return max(0.0, (cost.of(acceptance) - local) / passes)


def _round(cost: RoundCost, share: float, acceptance: Sequence[float]) -> tuple[float, float]:
    """What a round takes besides the network, and how often it pays the network."""
    local, slow = (
        (share + network) * shared(cost, share, network).of(acceptance) for network in (0.0, 1.0)
    )
    return local, slow - local
