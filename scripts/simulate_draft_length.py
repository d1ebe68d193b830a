"""How close --num-draft auto comes to the best fixed length and to plain decoding, simulated.

    python scripts/simulate_draft_length.py --seeds 100

Drives the shipped controller with published cost curves, noisy times and drawn acceptance; prints
one line a cell and a summary. Calibrated: measured curves are known at the start. Cold: nothing is.
Warm: what twenty texts before have taught, which began with nothing. Too high, too low: ten texts
ago, costs of earlier texts were twice and half of what is right. Where texts of 12 tokens end is
not known before, as with translations. Wandering: warm, on a machine that gets slower and faster.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.learned import Learned
from tests.decoding.batch_simulator import BatchMachine
from tests.decoding.simulator import CURVES, Machine, Texts, bimodal, constant, drifting

DRAFTS = (0.02, 0.1, 0.3)
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
TWO_CORES = {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.2, 16: 3.5, 32: 6.0, 64: 11.5, 128: 22.0}
"""By tokens of a pass, roughly as small models behave on two cores."""
FILES = 3
Shares = dict[str, list[tuple[float, str]]]
LONG, SHORT, SENTENCE = 1500, 100, 12
WARM_UP = range(1_000_000, 1_000_020)
"""Seeds of texts that only teach."""
WANDERING = 0.4
"""Standard deviation of the logarithm of a machine's slowness."""
WRONG = {"too high": 2.0, "too low": 0.5}
COLUMNS = (
    ("calibrated, round 20 to 1,500 tokens", "calibrated", LONG, 20),
    ("cold, round 40 to 1,500 tokens", "cold", LONG, 40),
    ("calibrated, 100 tokens", "calibrated", SHORT, 0),
    ("cold, 100 tokens", "cold", SHORT, 0),
    ("warm, 100 tokens", "warm", SHORT, 0),
    ("cold, 12 tokens", "cold", SENTENCE, 0),
    ("warm, 12 tokens", "warm", SENTENCE, 0),
    ("costs too high ten texts ago, 12 tokens", "too high", SENTENCE, 0),
    ("costs too low ten texts ago, 12 tokens", "too low", SENTENCE, 0),
    ("warm, 100 tokens, wandering", "wandering", SHORT, 0),
)


def cells() -> Iterator[tuple[str, Machine, bool]]:
    """Name, machine, and whether acceptance is constant."""
    kinds = [(f"{alpha:g}", constant(alpha), True) for alpha in ACCEPTANCES]
    kinds += [("drifting", drifting, False), ("bimodal", bimodal, False)]
    for curve, points in CURVES.items():
        for draft in DRAFTS:
            for kind, acceptance, steady in kinds:
                yield f"{curve}, c {draft:g}, {kind}", Machine(points, draft, acceptance), steady


def reached(machine: Machine, known: str, tokens: int, seeds: int, after: int) -> float:
    """Tokens per plain step."""
    abrupt = tokens == SENTENCE
    if known == "wandering":
        machine, known = replace(machine, drift=WANDERING), "warm"
    if known == "warm":
        texts = Texts(machine, tokens, abrupt=abrupt)
        texts.run(WARM_UP)
        return texts.run(range(seeds))
    costs: dict[int, float | Learned] | None = None
    if known != "cold":
        factor = WRONG.get(known, 1.0)
        costs = {n: factor * cost for n, cost in enumerate(machine.costs())}
        # What is too cheap was held against plain steps that took too long.
        costs[0] = Learned(1 / min(1.0, factor), 8.0)
    if known in WRONG:
        texts = Texts(machine, tokens, costs, abrupt=abrupt)
        texts.run(WARM_UP[:10])
        return texts.run(range(seeds))
    return machine.speed(lambda: AutoLength(costs), tokens, seeds, after, abrupt=abrupt)


def batches(seeds: int) -> Shares:
    """Files of texts of 6 to 30 tokens, by how many files were decoded before."""
    shares: Shares = {}
    for curve, points in (*CURVES.items(), ("two cores", TWO_CORES)):
        for alpha, draft, size in product((0.1, 0.5, 0.8), (0.05, 0.2), (2, 4, 16, 64)):
            dice = random.Random(size)
            texts = [dice.choice((6, 10, 12, 14, 20, 30)) for _ in range(4 * size)]
            machine = BatchMachine(points, draft, alpha)
            best = machine.best_fixed(size, texts, seeds)
            plain = machine.fixed(0, size, texts, seeds)
            name = f"{curve}, c {draft:g}, {alpha:g}, batches of {size}"
            for file, took in enumerate(machine.auto(size, texts, seeds, FILES)):
                shares.setdefault(f"file {file + 1} | of plain", []).append((plain / took, name))
                shares.setdefault(f"file {file + 1} | of the best", []).append((best / took, name))
    return shares


def summary(shares: Shares) -> None:
    """A table of each column's worst cell, tenth percentile and mean."""
    print("\n| | | worst | tenth percentile | mean |\n|---|---|---|---|---|")
    for title, values in shares.items():
        only = sorted(value for value, _ in values)
        worst, where = min(values)
        tenth = only[len(only) // 10]
        mean = sum(only) / len(only)
        print(f"| {title} | {worst:.3f} ({where}) | {tenth:.3f} | {mean:.3f} |")


def main() -> None:
    """Print a line a cell, and a summary of each column."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="*", help="these columns, counted from 0")
    parser.add_argument("--batches", action="store_true", help="files of texts, many at once")
    args = parser.parse_args()
    started = time.perf_counter()
    summary(batches(args.seeds) if args.batches else texts(args))
    print(f"{args.seeds} seeds, {time.perf_counter() - started:.0f} s")


def texts(args: argparse.Namespace) -> Shares:
    """Single texts; prints a line a cell."""
    columns = [c for i, c in enumerate(COLUMNS) if args.only is None or i in args.only]
    shares: Shares = {}
    for name, machine, steady in cells():
        parts = []
        for title, known, tokens, after in columns:
            # Where the text changes, both have to meet the same stretches of it.
            after = after if steady else 0
            auto = reached(machine, known, tokens, args.seeds, after)
            best, fixed = machine.best_fixed(tokens, args.seeds, after, abrupt=tokens == SENTENCE)
            parts.append(f"{auto / fixed:.2f} of {best:2d}, {auto:.2f} of plain")
            shares.setdefault(f"{title} | of plain", []).append((auto, name))
            shares.setdefault(f"{title} | of the best", []).append((auto / fixed, name))
        print(f"{name:36s}", " | ".join(parts), flush=True)
    return shares


if __name__ == "__main__":
    main()
