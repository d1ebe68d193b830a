"""Run by every rank of a test: texts of shared targets, one target after the other.

    python -m tests.distributed.cases SPEC.json

Rank 0 writes its results to the file that the specification names.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn.layers.distributed as layers

from mlx_specdec import load
from mlx_specdec.models.distributed import group
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support.loopback import result_of


class Sums:
    """Counts the sums that a rank enters."""

    def __init__(self) -> None:
        self.count = 0
        plain = mx.distributed.all_sum

        def counted(*args: Any, **kwargs: Any) -> mx.array:
            self.count += 1
            return plain(*args, **kwargs)

        mx.distributed.all_sum = counted


def disturb(rank: int, noise: float = 0.0, sleep: float = 0.0) -> None:
    """From now on sums come out a little different on this rank, and passes begin late."""
    if noise:
        plain_call = layers.ShardedToAllLinear.__call__

        def noisy(self: Any, states: mx.array) -> mx.array:
            right = plain_call(self, states)
            return right * (1 + noise * mx.random.normal(right.shape))

        layers.ShardedToAllLinear.__call__ = noisy
    if sleep:
        plain_run, rng = DecoderOnlyModel.run, random.Random(rank)

        def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.uniform(0, sleep))
            return plain_run(self, *args, **kwargs)

        DecoderOnlyModel.run = slow


def meet(rank: int, place: Path) -> None:
    """Wait until all ranks have come here: on a busy machine they start many seconds apart, and MLX
    tries to connect for no more than 15."""
    (place / f"ready-{rank}").touch()
    size = len(json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text()))
    while not all((place / f"ready-{number}").exists() for number in range(size)):
        time.sleep(0.01)


def main(spec: dict[str, Any]) -> None:
    rank, sums, written = int(os.environ["MLX_RANK"]), Sums(), []
    meet(rank, Path(spec["out"]).parent)
    for number, setting in enumerate(spec["settings"], start=1):
        disturb(rank, **setting["disturbed"].get(str(rank), {}))
        try:
            pair = load(setting["target"], setting["draft"], distributed=setting["mode"])
        except SystemExit as ended:
            # Rank 0 is done with this target.
            if ended.code or number == len(spec["settings"]):
                raise
            continue
        for case in setting["cases"]:
            before = sums.count
            report = result_of(pair, spec["prompt"], case)
            written.append(report | {"sums": sums.count - before})
        if number < len(spec["settings"]):
            group.join()._leader.end(0)
    Path(spec["out"]).write_text(json.dumps(written))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
