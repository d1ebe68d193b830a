"""Record the runs of tests/contract/recorded_runs.py again, all groups or those that are named:

    python benchmarks/record_runs.py [GROUP ...]

Runs whose smallest margin is below NEAR are left out."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.margins import score
from mlx_specdec import Request
from tests.contract import recorded_runs as runs

NEAR = 2e-4
"""A margin in nats below which a record would depend on the processor."""


def has_near_tie(pair: Any, request: Request, result: Any) -> bool:
    margins = score(pair, request.options, request.prompt, result.tokens)
    return margins is not None and min(margins.values, default=NEAR) < NEAR


def main(names: list[str]) -> None:
    recorded = json.loads(runs.RECORDED.read_text()) if runs.RECORDED.exists() else {}
    os.environ["MLX_SPECDEC_CACHE"] = tempfile.mkdtemp()
    runs.has_near_tie = has_near_tie
    for name in names or runs.GROUPS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            found = runs.GROUPS[name](Path(home))
        recorded[name] = {key: value for key, value in found.items() if value != runs.NEAR_TIE}
        near, took = len(found) - len(recorded[name]), time.monotonic() - began
        print(f"{name}: {len(found)} runs, {near} near ties left out, {took:.1f} s", flush=True)
    runs.RECORDED.write_text(json.dumps(recorded, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
