"""What bench tells beside its figures where several machines share the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .groups import Models

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..bench.analysis import Analysis
    from ..bench.methods import Length
    from ..estimate.result import Cluster
    from ..ranks.link import LinkTimer


class Together:
    """The machines of a target that is shared, and the network between them.

    model: the target as it was named. lengths: numbers of drafted tokens that are measured. Raises
    CheckpointError where config.json does not tell how often machines exchange something.
    """

    def __init__(self, pair: Pair, model: str, models: Models, lengths: Sequence[Length]) -> None:
        from ..ranks.group import join
        from ..ranks.link import LinkTimer

        ranks = join()
        self._cluster = _cluster(model, models, ranks.size)
        sizes = [1, *(length + 1 for length in lengths if length != "auto")]
        self._timer: LinkTimer = LinkTimer(ranks, pair.target, sizes, self._cluster.exchanges)

    def turn(self, times: int) -> None:
        """Time sums over the machines; between texts, so that both see the same network."""
        self._timer.turn(times)

    def told(self, analysis: Analysis) -> Analysis:
        """With what was found out."""
        from ..bench.cluster import of_cluster

        seconds, known = self._timer.seconds(), self._cluster
        if not seconds:
            return analysis
        figures = of_cluster(
            analysis,
            seconds,
            machines=known.machines,
            mode=known.mode,
            exchanges=known.exchanges,
            share=known.share,
        )
        return replace(analysis, cluster=figures)


def _cluster(model: str, models: Models, machines: int) -> Cluster:
    """How many exchanges a pass has, and how much of it is each machine's own."""
    from ..checkpoints.files import read_config
    from ..checkpoints.source import resolve_config
    from ..estimate.cluster import Link, cluster
    from ..estimate.pair import Asked

    config = read_config(resolve_config(model, revision=models.revision))
    known = Asked(model, config, models.dtype, models.q_bits).outline()
    return cluster(Link(machines, 0.0, models.distributed == "pipeline"), known, 0)
