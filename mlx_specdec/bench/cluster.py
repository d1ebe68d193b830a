"""What speculation gains on machines that share a target, beside what it would on one of them.

One machine may not hold the target, so that its figures are computed: from what was measured on all
of them, without the network, a machine's part of a pass being known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..costs.cluster import break_even
from ..costs.speedup import RoundCost
from .analysis import Analysis, Figures, overall


@dataclass(frozen=True)
class Gain:
    """Of a method over plain decoding. speed_up: on the machines, measured. alone: on one of them,
    computed. break_even_us: how long an exchange takes from which on speculation gains more on the
    machines than on one; None where it never does."""

    name: str
    speed_up: float
    alone: float
    break_even_us: float | None


@dataclass(frozen=True)
class ClusterFigures:
    """machines: how many. exchanges: of a plain step, and of a round. exchange_us: what one takes
    among the others of a pass, by the pass's tokens. share: of a pass on one machine, that each
    takes without the network. network_ms: of a plain step. gains: of the methods whose rounds were
    timed in parts; none where exchanges alone took as long as plain steps."""

    machines: int
    mode: str
    exchanges: int
    exchange_us: Mapping[int, float]
    share: float
    network_ms: float
    gains: Sequence[Gain]


def of_cluster(
    analysis: Analysis,
    exchange_seconds: Mapping[int, float],
    *,
    machines: int,
    mode: str,
    exchanges: int,
    share: float,
) -> ClusterFigures:
    """From figures that were measured on all machines. exchange_seconds: by the pass's tokens, 1
    and those of each draft length's rounds among them."""
    network = exchanges * exchange_seconds[1]
    gains: list[Gain] = []
    for method in analysis.methods:
        if method.num_draft != "auto" and method.num_draft + 1 in exchange_seconds:
            paid = exchanges * exchange_seconds[method.num_draft + 1]
            gains += _gain(method, analysis.plain_step - network, paid, exchanges, share)
    return ClusterFigures(
        machines=machines,
        mode=mode,
        exchanges=exchanges,
        exchange_us={rows: 1e6 * seconds for rows, seconds in exchange_seconds.items()},
        share=share,
        network_ms=1000 * network,
        gains=gains,
    )


def _gain(
    method: Figures, own_step: float, paid: float, exchanges: int, share: float
) -> Sequence[Gain]:
    """One, or none where times contradict one another. own_step: seconds of a plain step without
    the network. paid: seconds of the network in a round."""
    parts, tokens = method.parts, method.tokens_per_round
    if parts is None or tokens is None or own_step <= 0 or parts.verify <= paid:
        return []
    step = own_step / share
    cost = RoundCost(
        draft=(parts.draft + parts.other) / step,
        passes={1: 1.0, 2: (parts.verify - paid) / own_step},
    )
    # All drafted tokens of a round as one, since their times are known together.
    acceptance = (tokens - 1,)
    even = break_even(cost, share, acceptance)
    return [
        Gain(
            name=method.name,
            speed_up=overall(method),
            alone=tokens / cost.of(acceptance),
            break_even_us=None if even is None else 1e6 * even * step / exchanges,
        )
    ]
