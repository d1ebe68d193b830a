"""Run by every rank of a test: texts of a shared target beside those of the whole one.

    python -m tests.ranks.cases SPEC.json

Rank 0 writes what it has found to the file that the specification names.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn.layers.distributed as layers

from mlx_specdec import Options, generate_many, load, stream_generate
from mlx_specdec.assemble import Pair
from mlx_specdec.models.decoder_only import DecoderOnlyModel

RANK = int(os.environ["MLX_RANK"])


class Sums:
    """Counts the sums that a rank enters."""

    def __init__(self) -> None:
        self.count = 0
        plain = mx.distributed.all_sum

        def counted(*args: Any, **kwargs: Any) -> mx.array:
            self.count += 1
            return plain(*args, **kwargs)

        mx.distributed.all_sum = counted


def disturb(noise: float = 0.0, sleep: float = 0.0) -> None:
    """On this rank, sums come out a little different, and passes take some time to begin."""
    if noise:
        plain_call = layers.ShardedToAllLinear.__call__

        def noisy(self: Any, states: mx.array) -> mx.array:
            right = plain_call(self, states)
            return right * (1 + noise * mx.random.normal(right.shape))

        layers.ShardedToAllLinear.__call__ = noisy
    if sleep:
        plain_run, rng = DecoderOnlyModel.run, random.Random(RANK)

        def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.uniform(0, sleep))
            return plain_run(self, *args, **kwargs)

        DecoderOnlyModel.run = slow


def told(pair: Pair, case: dict[str, Any], sums: Sums) -> dict[str, Any]:
    """One text, or several, and what they took."""
    asked = {k: v for k, v in case.items() if k != "prompts"}
    options = Options(cost_cache=False, **asked)
    before = sums.count
    if "prompts" in case:
        results = generate_many(pair, case["prompts"], options, batch_size=4)
        return {"texts": [each.text for each in results], "sums": sums.count - before}
    result = stream_generate(pair, PROMPT, options).result()
    stats = result.stats
    return {
        "texts": [result.text],
        "reason": result.finish_reason,
        "tokens": len(result.tokens),
        "rounds": stats.rounds,
        "passes": stats.target_passes,
        "accepted": stats.accepted,
        "sums": sums.count - before,
    }


def main(spec: dict[str, Any]) -> None:
    disturb(**spec.get("disturbed", {}).get(str(RANK), {}))
    sums = Sums()
    loading = spec.get("loading", {})
    target, draft = spec["target"], spec.get("draft")
    shared = load(target, draft, distributed=spec["distributed"], **loading)
    found = [told(shared, case, sums) for case in spec["cases"]]
    alone = load(target, draft, **loading)
    for each, case in zip(found, spec["cases"], strict=True):
        each["expected"] = told(alone, case, sums)["texts"]
    Path(spec["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    told_spec = json.loads(Path(sys.argv[1]).read_text())
    PROMPT = told_spec["prompt"]
    main(told_spec)
