"""Costs that texts have measured, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

EARLIER_COST_WEIGHT = 20.0
"""How many rounds of this sequence a cost that was measured earlier counts for."""


class Learned(NamedTuple):
    """A cost in plain steps, and how many rounds stand behind it."""

    cost: float
    rounds: float


Known = Mapping[int, float | Learned]
"""Costs by drafted length."""


def weighed(costs: Known) -> dict[int, Learned]:
    """Each with its rounds, EARLIER_COST_WEIGHT where they are not told."""
    return {
        n: each if isinstance(each, Learned) else Learned(each, EARLIER_COST_WEIGHT)
        for n, each in costs.items()
    }


def rising(known: Mapping[int, Learned]) -> dict[int, float]:
    """The costs without what can only be noise: a longer draft does not cost less, nor does any
    cost less than a plain step. Source: pooling adjacent violators, Ayer et al. 1955."""
    pools = [([0], Learned(1.0, EARLIER_COST_WEIGHT))]
    for length in sorted(known):
        pools.append(([length], known[length]))
        while len(pools) > 1 and pools[-1][1].cost < pools[-2][1].cost:
            (more, one), (fewer, other) = pools.pop(), pools.pop()
            rounds = one.rounds + other.rounds
            cost = (one.rounds * one.cost + other.rounds * other.cost) / rounds
            pools.append((fewer + more, Learned(cost, rounds)))
    scale = pools[0][1].cost
    return {length: pooled.cost / scale for lengths, pooled in pools for length in lengths}
