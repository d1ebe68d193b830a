"""S(gamma) where several machines share the target.

A pass takes a machine its `share` of what it takes one that is alone, and the network once, however
many tokens the pass has; a draft is not divided. That a round pays the network once, and not once a
token, is why speculation mostly gains more on slow networks than on one machine. `share` and
`network` are in plain steps of one machine. Plain numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from .speedup import RoundCost


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
