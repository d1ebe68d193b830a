"""How close --num-draft auto comes to the best fixed length and to plain decoding, simulated.

    python scripts/simulate_draft_length.py --seeds 100

Drives the shipped controller with published cost curves, noisy times and drawn acceptance; prints
one line a cell and the worst of each column. Calibrated: measured curves are known at the start.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec.decoding.draft_length import AutoLength
from tests.decoding.simulator import CURVES, Machine, bimodal, constant, drifting

DRAFTS = (0.02, 0.1, 0.3)
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
LONG, SHORT = 1500, 100
COLUMNS = (
    ("calibrated, round 20 to 1,500 tokens", True, LONG, 20),
    ("cold, round 40 to 1,500 tokens", False, LONG, 40),
    ("calibrated, 100 tokens", True, SHORT, 0),
    ("cold, 100 tokens", False, SHORT, 0),
)


def cells() -> Iterator[tuple[str, Machine, bool]]:
    """Name, machine, and whether acceptance is constant."""
    kinds = [(f"{alpha:g}", constant(alpha), True) for alpha in ACCEPTANCES]
    kinds += [("drifting", drifting, False), ("bimodal", bimodal, False)]
    for curve, points in CURVES.items():
        for draft in DRAFTS:
            for kind, acceptance, steady in kinds:
                yield f"{curve}, c {draft:g}, {kind}", Machine(points, draft, acceptance), steady


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", type=int, help="one column, counted from 0")
    args = parser.parse_args()
    started = time.perf_counter()
    columns = [c for i, c in enumerate(COLUMNS) if args.only in (None, i)]
    worst: dict[str, tuple[float, str]] = {}
    for name, machine, steady in cells():
        parts = []
        for title, calibrated, tokens, after in columns:
            costs = dict(enumerate(machine.costs())) if calibrated else None
            # Where the text changes, both have to meet the same stretches of it.
            after = after if steady else 0
            auto = machine.speed(lambda c=costs: AutoLength(c), tokens, args.seeds, after)
            best, fixed = machine.best_fixed(tokens, args.seeds, after)
            parts.append(f"{auto / fixed:.2f} of {best:2d}, {auto:.2f} of plain")
            keys = [(f"{title}: of plain", auto)]
            keys.append((f"{title}: of the best{'' if steady else ' (changing)'}", auto / fixed))
            for key, value in keys:
                worst[key] = min(worst.get(key, (math.inf, "")), (value, name))
        print(f"{name:36s}", " | ".join(parts), flush=True)
    print()
    for key, (value, name) in sorted(worst.items()):
        print(f"worst {key}: {value:.3f} ({name})")
    print(f"{args.seeds} seeds, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
