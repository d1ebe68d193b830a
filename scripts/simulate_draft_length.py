"""How close --num-draft auto comes to the best fixed length and to plain decoding, simulated.

    python scripts/simulate_draft_length.py --seeds 20

Drives the shipped controller with published cost curves, noisy times and drawn acceptance; prints
one line a cell and a summary. Cold: nothing is known. Warm: what twenty texts before have taught,
which began with nothing. Too high, too low: ten texts ago, costs of earlier texts were twice and
half of what is right. Where texts of 12 tokens end is not known before, as with translations.
Wandering: warm, on a machine that gets slower and faster. Stalls: one round in thirty takes five
times as long. Lookup: before the draft, for one token in twenty, mostly wrong. Contexts: texts of
100 tokens behind 100, 2,000, 8,000 and 32,000, in turns.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.costs import MOST, Block, unknown
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.draft_length.saved import Knowledge
from tests.support.draft_length_simulator import (
    CURVES,
    DRAFT,
    TWO_CORES,
    BatchMachine,
    Machine,
    Texts,
    bimodal,
    constant,
    drifting,
)

DRAFTS = (0.02, 0.1, 0.3)
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
FILES = 3
Shares = dict[str, list[tuple[float, str]]]
LONG, SHORT, SENTENCE = 1500, 100, 12
WARM_UP = range(1_000_000, 1_000_020)
"""Seeds of texts that only teach."""
WRONG = {"too high": 2.0, "too low": 0.5}
KINDS = {
    "wandering": {"drift": 0.4},
    "stalls": {"stalls": 0.03},
    "lookup": {"matches": 0.05, "lookup": 0.2},
}
CONTEXTS = (100, 2_000, 8_000, 32_000)
ATTENTION = 1e-4
"""Plain steps that a token of the context makes each row dearer: an 8B model in 4 bits whose kernel
reads keys for each row."""
COLUMNS = (
    ("cold, round 40 to 1,500 tokens", "cold", LONG, 40),
    ("cold, 100 tokens", "cold", SHORT, 0),
    ("warm, 100 tokens", "warm", SHORT, 0),
    ("cold, 12 tokens", "cold", SENTENCE, 0),
    ("warm, 12 tokens", "warm", SENTENCE, 0),
    ("costs too high ten texts ago, 12 tokens", "too high", SENTENCE, 0),
    ("costs too low ten texts ago, 12 tokens", "too low", SENTENCE, 0),
    ("warm, 100 tokens, wandering", "wandering", SHORT, 0),
    ("warm, 100 tokens, stalls", "stalls", SHORT, 0),
    ("warm, 100 tokens, lookup before the draft", "lookup", SHORT, 0),
    ("warm, 100 tokens, contexts", "contexts", SHORT, 0),
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
    if known == "cold":
        abrupt = tokens == SENTENCE
        return machine.speed(lambda: AutoLength([DRAFT]), tokens, seeds, after, abrupt=abrupt)
    knowledge, before = None, WARM_UP
    if known in WRONG:
        knowledge, before = wrong(machine, WRONG[known]), WARM_UP[:10]
    machine = replace(machine, **KINDS.get(known, {}))
    texts = Texts(machine, tokens, knowledge, abrupt=tokens == SENTENCE)
    texts.run(before)
    return texts.run(range(seeds))


def wrong(machine: Machine, factor: float) -> Knowledge:
    """Costs that are all wrong by a factor, as if some texts had measured them."""
    mean, covariance = unknown()
    mean = mean.copy()
    mean[:MOST] = np.log(factor * np.array(machine.costs())[1:])
    return Knowledge({DRAFT.costs: {1: Block(mean, 0.1 * covariance)}})


def contexts(machine: Machine, tokens: int, seeds: int) -> tuple[float, float]:
    """Speed over plain and over the best length of each context, texts of several in turns."""
    each = [replace(machine, context=n, attention=ATTENTION) for n in CONTEXTS]
    best = [one.best_fixed(tokens, seeds)[1] for one in each]
    texts = Texts(machine, tokens)
    clock = fastest = 0.0
    for seed in (*WARM_UP, *range(seeds)):
        for one, speed in zip(each, best, strict=True):
            texts.machine = one
            took = tokens / texts.run([seed])
            if seed < seeds:
                clock, fastest = clock + took, fastest + tokens / speed
    return seeds * len(each) * tokens / clock, fastest / clock


def batches(seeds: int) -> Shares:
    """Files of texts of 6 to 30 tokens, and texts that come one by one as to a server, by how many
    files were decoded before."""
    shares: Shares = {}
    for curve, points in (*CURVES.items(), ("two cores", TWO_CORES)):
        for alpha, draft, size in product((0.1, 0.5, 0.8), (0.05, 0.2), (2, 4, 16, 64)):
            dice = random.Random(size)
            texts = [dice.choice((6, 10, 12, 14, 20, 30)) for _ in range(4 * size)]
            for kind, every in (("file", 0.0), ("server", 16.0 / size)):
                machine = BatchMachine(points, draft, alpha, joins_at=0.0 if every else 0.25)
                fixed = [
                    sum(
                        machine.time(FixedLength(n), size, texts, seed, every)
                        for seed in range(seeds)
                    )
                    / seeds
                    for n in (0, 1, 2, 3, 5, 8)
                ]
                name = f"{curve}, c {draft:g}, {alpha:g}, batches of {size}"
                for file, took in enumerate(machine.auto(size, texts, seeds, FILES, every)):
                    title = f"{kind} {file + 1}"
                    shares.setdefault(f"{title} | of plain", []).append((fixed[0] / took, name))
                    best = min(fixed) / took
                    shares.setdefault(f"{title} | of the best", []).append((best, name))
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
    parser.add_argument("--seeds", type=int, default=20)
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
            if known == "contexts":
                auto, of_best = contexts(machine, tokens, args.seeds)
                parts.append(f"{of_best:.2f} of the best, {auto:.2f} of plain")
            else:
                # Where the text changes, both have to meet the same stretches of it.
                after = after if steady else 0
                auto = reached(machine, known, tokens, args.seeds, after)
                abrupt = tokens == SENTENCE
                best, fixed = machine.best_fixed(tokens, args.seeds, after, abrupt=abrupt)
                of_best = auto / fixed
                parts.append(f"{of_best:.2f} of {best:2d}, {auto:.2f} of plain")
            shares.setdefault(f"{title} | of plain", []).append((auto, name))
            shares.setdefault(f"{title} | of the best", []).append((of_best, name))
        print(f"{name:36s}", " | ".join(parts), flush=True)
    return shares


if __name__ == "__main__":
    main()
