"""What speculation gains on machines that share a target, beside what it would on one of them.

One machine may not hold the target, so that its figures are computed: from what was measured on all
of them, without the network, a machine's part of a pass being known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..draft_length.speedup import RoundCost, break_even, pays_below, shared
from ..errors import OptionError
from ..models.base import Base
from ..models.distributed.group import Ranks
from ..models.outline import Outline
from .estimate_result import Cluster, ClusterPrediction, ClusterSpeeds, Prediction, best, chances

SUMS = {"encoder-decoder": 3, "decoder-only": 2}
"""Over all machines, in a layer that decodes."""
AGREEMENTS = 1
"""Exchanges a round in which the first machine tells the others what it has decided."""


@dataclass(frozen=True)
class Link:
    """What connects machines. seconds: that an exchange takes, whatever it carries. pipeline: each
    machine has some of the layers, and not a part of all."""

    machines: int
    seconds: float
    pipeline: bool = False


def cluster(link: Link, target: Outline, caches_bytes: int) -> Cluster:
    """What a machine holds of a target, and how much of a pass is its own.

    caches_bytes: of the whole target. Raises OptionError for a family that has no pipeline.
    """
    if link.pipeline and target.kind == "encoder-decoder":
        raise OptionError("a T5 model cannot be a pipeline: leave out --pipeline")
    machines, layers = link.machines, sum(target.layer_nbytes)
    # What belongs to tokens is on every machine, and a step reads one such table: the head.
    of_tokens = target.token_nbytes
    divided = layers / (layers + max(of_tokens, default=0))
    weights = sum(of_tokens) + (target.nbytes - sum(of_tokens)) / machines
    # A pipeline hands its states on from machine to machine, and what comes out to all of them.
    passes = machines + 1 if link.pipeline else SUMS[target.kind] * len(target.layers)
    return Cluster(
        machines=machines,
        mode="pipeline" if link.pipeline else "tensor",
        link_us=1e6 * link.seconds,
        exchanges=passes + AGREEMENTS,
        share=1.0 if link.pipeline else divided / machines + 1 - divided,
        target_bytes=round(weights + caches_bytes / machines),
        speeds=None,
    )


def with_speeds(
    told: Cluster, cost: RoundCost, step_seconds: float, alone: Sequence[Prediction]
) -> Cluster:
    """With what follows from the costs on one machine, whose plain step takes `step_seconds`.

    alone: the predictions for one machine.
    """
    exchanges = 1e-6 * told.link_us * told.exchanges
    network, longest = exchanges / step_seconds, max(cost.passes) - 1
    of_cluster = shared(cost, told.share, network)

    def link_us(network: float) -> float:
        return 1e6 * network * step_seconds / told.exchanges

    predictions = []
    for one in alone:
        chosen = best(of_cluster, one.alpha, longest)
        even = None
        if length := one.num_draft or chosen.num_draft:
            even = break_even(cost, told.share, chances(one.alpha, length))
        below = pays_below(cost, told.share, chances(one.alpha, chosen.num_draft))
        predictions.append(
            ClusterPrediction(
                **vars(chosen),
                break_even_us=None if even is None else link_us(even),
                pays_below_us=link_us(below),
            )
        )
    speeds = ClusterSpeeds(
        step_seconds=told.share * step_seconds + exchanges,
        pays_below_us=link_us(pays_below(cost, told.share, ())),
        predictions=tuple(predictions),
    )
    return replace(told, speeds=speeds)


class LinkTimer:
    """sizes: tokens of the passes. sums: how many follow one another in a pass."""

    def __init__(self, ranks: Ranks, target: Base, sizes: Sequence[int], sums: int) -> None:
        self._ranks = ranks
        self._target = target
        self._sums = sums
        self._seconds: dict[int, list[float]] = {size: [] for size in sorted(set(sizes))}

    def turn(self, times: int = 1) -> None:
        """Time the sums of a pass of every size, `times` over."""
        for _ in range(times):
            for size, taken in self._seconds.items():
                taken.append(self._ranks.time_sums(self._target, size, self._sums) / self._sums)

    def seconds(self) -> dict[int, float]:
        """The median of one sum by the tokens of its pass; empty before the first turn."""
        return {size: median(taken) for size, taken in self._seconds.items() if taken}
