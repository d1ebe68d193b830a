"""What a sum over all machines takes: alone, and among as many as a pass has.

    mlx.launch -n 2 --backend ring -- python scripts/measure_all_sum.py --width 4096 --rows 1,2,4,8

The machines add up states of a model of that width, for one token and for several. `alone` is one
sum that is waited for; `in_a_pass` is one of --sums that follow one another in one piece of work,
as those of layers do, and docs/clusters.md says which times pay. `same_as_alone` is the share of a
token's numbers that are the same to the last bit in a sum over several tokens: three machines and
more may add up in another order there. The first machine prints JSON: medians in
microseconds, and of nine in ten sums the longest.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx

WARM = 5
SLOWEST = 0.9
DTYPES = ("float16", "bfloat16", "float32")


def sums(states: mx.array, count: int, group: mx.distributed.Group) -> mx.array:
    """The states again, after so many sums over the group; lazily."""
    for _ in range(count):
        states = mx.distributed.all_sum(states, group=group) * (1 / group.size())
    return states


def timed(work: Callable[[], object], turns: int) -> list[float]:
    """Microseconds of each turn, without those that warm up."""
    taken = []
    for _ in range(WARM + turns):
        started = time.perf_counter()
        work()
        taken.append(1e6 * (time.perf_counter() - started))
    return taken[WARM:]


def figures(taken: Sequence[float], each: int = 1) -> dict[str, float]:
    """Of one sum, where every sample has `each` of them."""
    ordered = sorted(taken)
    slow = ordered[min(len(ordered) - 1, int(SLOWEST * len(ordered)))]
    return {"median_us": round(median(ordered) / each, 1), "p90_us": round(slow / each, 1)}


def same_as_alone(
    group: mx.distributed.Group, width: int, rows: int, dtype: mx.Dtype, seed: int = 0
) -> float:
    """The share of the first row's sums that are the same where that row is summed alone."""
    key = mx.random.key(1000 * seed + group.rank())
    states = mx.random.normal((rows, width), key=key).astype(dtype)
    together = mx.distributed.all_sum(states, group=group)[:1]
    mx.eval(together)
    alone = mx.distributed.all_sum(states[:1], group=group)
    return float((together == alone).astype(mx.float32).mean().item())


def measure(
    group: mx.distributed.Group, width: int, rows: int, dtype: mx.Dtype, count: int, turns: int
) -> dict[str, Any]:
    """What summing (rows, width) takes."""
    states = mx.ones((rows, width), dtype=dtype)
    mx.eval(states)
    alone = timed(lambda: mx.eval(sums(states, 1, group)), turns)
    chain = timed(lambda: mx.eval(sums(states, count, group)), max(1, turns // 10))
    same = same_as_alone(group, width, rows, dtype)
    report = {"rows": rows, "bytes": states.nbytes, "same_as_alone": round(same, 4)}
    return {**report, "alone": figures(alone), "in_a_pass": figures(chain, count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096, help="of the model's hidden states")
    parser.add_argument("--rows", default="1,2,4,8,16", help="tokens of a pass, with commas")
    parser.add_argument("--sums", type=int, default=64, help="of a pass: mostly two a layer")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--backend", default="any", help="as mx.distributed.init has it")
    args = parser.parse_args()
    group = mx.distributed.init(strict=True, backend=args.backend)
    mx.eval(sums(mx.ones(group.size()), 1, group))  # all are there
    dtype = getattr(mx, args.dtype)
    measured = [
        measure(group, args.width, int(rows), dtype, args.sums, args.turns)
        for rows in args.rows.split(",")
    ]
    if group.rank() == 0:
        machines = {"machines": group.size(), "device": str(mx.default_device())}
        report = {**machines, "width": args.width, "dtype": args.dtype, "sums": measured}
        print(json.dumps(report, indent=2), flush=True)


if __name__ == "__main__":
    main()
