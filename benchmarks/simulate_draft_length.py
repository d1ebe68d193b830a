"""Simulate how close `--num-draft auto` comes to the best fixed length and to plain decoding.

    python benchmarks/simulate_draft_length.py --seeds 20 [texts | contexts | batches]

The shipped controller meets published cost curves, noisy times and drawn acceptance. Prints one
line a cell and a summary. The kinds of cells are:

- cold: nothing is known before the text. warm: the controller has seen twenty texts.
- too high, too low: ten texts ago, the stored costs were twice or half of the true ones.
- wandering, stalls, changing: the machine's speed drifts, one round in thirty takes five times as
  long, or the speed doubles or halves from the 30th round on.
- wrong lookup, good lookup: prompt lookup proposes before the draft model does.
- contexts: texts of 100 tokens follow 100 to 64,000 tokens.
- batches: three files in a row, or the same texts one by one as to a server."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.costs import MOST, Block, unknown
from mlx_specdec.draft_length.saved import Knowledge, as_knowledge
from tests.support.draft_length_simulator import (
    CURVES,
    SLOW_BLAS,
    TWO_CORES,
    Files,
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
HISTORIES, WARM_UP, TEACHING = 4, 20, 1_000_000
"""Times that a cell begins anew, so that one unlucky beginning does not decide it; texts that only
teach then, and the seed of the first of them."""
CALIBRATION, CALIBRATIONS = 2_000_000, list[float]()
"""Seed of what is measured before them, and the plain steps that it took."""
WRONG = {"too high": 2.0, "too low": 0.5}
KINDS = {
    "wandering": {"drift": 0.4},
    "stalls": {"stalls": 0.03},
    "changing": {"changes": 2.0},
    "wrong lookup": {"matches": 0.05, "lookup": 0.2},
    "good lookup": {"matches": 0.25, "lookup": 0.8},
}
CONTEXTS = (100, 2_000, 8_000, 32_000, 64_000)
MACHINES = {
    # An 8B model in 4 bits, whose keys of 32k tokens take as long to read as its weights.
    "M4 Pro": (CURVES["M4 Pro 4-bit"], 1 / 32_768, 0.0),
    # So that 16 drafted tokens gain 2.1 at 2k tokens and lose at 32k (jundot/omlx#873).
    "M5 Max": (CURVES["M5 Max 70B"], 1.5e-4, 0.0),
    # Without a kernel of its own for attention: rows share a part of it.
    "CPU": (TWO_CORES, 1e-4, 0.5),
}
"""Cost by tokens of a pass, plain steps that a token of the context takes each row, and the share
that rows pay together."""
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
    ("warm, 100 tokens, changing", "changing", SHORT, 0),
    ("warm, 100 tokens, wrong lookup before the draft", "wrong lookup", SHORT, 0),
    ("warm, 100 tokens, good lookup before the draft", "good lookup", SHORT, 0),
)


def cells() -> Iterator[tuple[str, Machine, bool]]:
    """Name, machine, and whether acceptance is constant."""
    kinds = [(f"{alpha:g}", constant(alpha), True) for alpha in ACCEPTANCES]
    kinds += [("drifting", drifting, False), ("bimodal", bimodal, False)]
    for curve, points in CURVES.items():
        for draft in DRAFTS:
            for kind, acceptance, steady in kinds:
                yield f"{curve}, c {draft:g}, {kind}", Machine(points, draft, acceptance), steady
    yield "slow BLAS, 0.45", Machine(SLOW_BLAS, 0.17, constant(0.45), start=0.05), True


def reached(machine: Machine, known: str, tokens: int, seeds: int, after: int) -> float:
    """Tokens per plain step."""
    abrupt = tokens == SENTENCE
    if known == "cold":
        sources = machine.sources
        return machine.speed(lambda: AutoLength(sources), tokens, seeds, after, abrupt=abrupt)
    machine, spent = replace(machine, **KINDS.get(known, {})), 0.0
    for history in range(HISTORIES):
        if known in WRONG:
            knowledge, before = wrong(machine, WRONG[known]), 10
        else:
            knowledge, took = machine.calibrated(CALIBRATION + history)
            CALIBRATIONS.append(took)
            before = WARM_UP
        several = Texts(machine, tokens, knowledge, abrupt=abrupt)
        several.run([TEACHING + before * history + text for text in range(before)])
        its = range(seeds)[history::HISTORIES]
        spent += len(its) / several.run(its) if its else 0.0
    return seeds / spent


def wrong(machine: Machine, factor: float) -> Knowledge:
    """Costs that are all wrong by a factor, as if some texts had measured them."""
    mean, covariance = unknown()
    mean = mean.copy()
    mean[:MOST] = np.log(factor * np.array(machine.costs())[1:])
    return as_knowledge({machine.sources[-1].costs: {1: Block(mean, 0.1 * covariance)}})


def texts(seeds: int, only: Sequence[int] | None) -> Shares:
    """Single texts; prints a line a cell."""
    columns = [c for i, c in enumerate(COLUMNS) if only is None or i in only]
    shares: Shares = {}
    for name, machine, steady in cells():
        parts = []
        for title, known, tokens, after in columns:
            # Where the text changes, both have to meet the same stretches of it.
            after = after if steady else 0
            auto = reached(machine, known, tokens, seeds, after)
            best, fixed = machine.best_fixed(tokens, seeds, after, abrupt=tokens == SENTENCE)
            parts.append(f"{auto / fixed:.2f} of {best:2d}, {auto:.2f} of plain")
            shares.setdefault(f"{title} | of plain", []).append((auto, name))
            shares.setdefault(f"{title} | of the best", []).append((auto / fixed, name))
        print(f"{name:36s}", " | ".join(parts), flush=True)
    return shares


def contexts(seeds: int) -> Shares:
    """Warm texts of 100 tokens behind contexts of several lengths, in turns."""
    shares: Shares = {}
    for name, draft, alpha in product(MACHINES, (0.02, 0.1, 0.3), (0.3, 0.5, 0.7, 0.9)):
        curve, attention, shared = MACHINES[name]
        machine = Machine(curve, draft, constant(alpha), attention=attention, shared=shared)
        each = [replace(machine, context=n) for n in CONTEXTS]
        best = [one.best_fixed(SHORT, seeds)[1] for one in each]
        several = Texts(machine, SHORT, machine.calibrated(CALIBRATION)[0])
        clocks = [0.0] * len(each)
        for seed in (*range(TEACHING, TEACHING + WARM_UP), *range(seeds)):
            for place, one in enumerate(each):
                several.machine = one
                took = SHORT / several.run([seed])
                clocks[place] += took if seed < seeds else 0.0
        parts = []
        for one, fixed, clock in zip(each, best, clocks, strict=True):
            auto, title = seeds * SHORT / clock, f"{one.context:,} tokens before"
            parts.append(f"{auto / fixed:.2f} of the best, {auto:.2f} of plain")
            cell = f"{name}, c {draft:g}, {alpha:g}"
            shares.setdefault(f"{title} | of plain", []).append((auto, cell))
            shares.setdefault(f"{title} | of the best", []).append((auto / fixed, cell))
        print(f"{cell:24s}", " | ".join(parts), flush=True)
    return shares


def batches(seeds: int, sizes: Sequence[int]) -> Shares:
    """Files of texts, and texts that come one by one, by how many files were decoded before."""
    shares: Shares = {}
    machines = {**CURVES, "two cores": TWO_CORES}
    for curve, alpha, draft, size in product(machines, (0.1, 0.5, 0.8), (0.05, 0.2), sizes):
        dice = random.Random(size)
        tokens = [dice.choice((6, 10, 12, 14, 20, 30)) for _ in range(4 * size)]
        for kind, matches in product(("file", "even", "server"), (0.0, 0.1)):
            every = 16.0 / size if kind == "server" else 0.0
            machine = Machine(
                machines[curve], draft, constant(alpha), 0.15, matches=matches, lookup=0.5
            )
            several = Files(machine, [24] * len(tokens) if kind == "even" else tokens, size, every)
            fixed, parts = several.fixed(seeds), []
            name = f"{curve}, c {draft:g}, {alpha:g}, {size} at once"
            name += ", lookup before the draft" if matches else ""
            for file, took in enumerate(several.auto(seeds, FILES)):
                title = f"{kind} {file + 1}"
                of_plain, of_best = fixed[0] / took, min(fixed.values()) / took
                parts.append(f"{of_best:.2f} of the best, {of_plain:.2f} of plain")
                shares.setdefault(f"{title} | of plain", []).append((of_plain, name))
                shares.setdefault(f"{title} | of the best", []).append((of_best, name))
            print(f"{kind:6s} {name:64s}", " | ".join(parts), flush=True)
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
    parser.add_argument("what", nargs="*", default=["texts", "contexts", "batches"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="*", help="these columns, counted from 0")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 16], help="of batches")
    args = parser.parse_args()
    for what in args.what:
        started = time.perf_counter()
        if what == "texts":
            summary(texts(args.seeds, args.only))
        else:
            summary(contexts(args.seeds) if what == "contexts" else batches(args.seeds, args.sizes))
        if took := CALIBRATIONS:
            mean = sum(took) / len(took)
            print(f"calibrations: {min(took):.0f} to {max(took):.0f} plain steps, mean {mean:.0f}")
        print(f"{what}: {args.seeds} seeds, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
