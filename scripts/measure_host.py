"""What the Python thread costs a pass, here and in mlx-lm, on the same weights in one process.

    python scripts/measure_host.py prompts/python.jsonl [-m 100] [--temp 0] [--repeats 5]

CPU time of the thread that builds the graphs, and wall time, for plain decoding, fixed draft
lengths and `auto`, all methods in turns: milliseconds a pass of the target, microseconds a token;
medians over the repeats with their range, and ratios to mlx-lm's of the same repeat. What reading
the prompt costs is measured with texts of one token, and taken off. With --batch-size, plain
decoding of all prompts at once. Then where the thread's time goes, by part, under timers that make
it a little dearer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import process

process.load()

import mlx.core as mx  # noqa: E402

from mlx_specdec.decoding.sequence import Batch  # noqa: E402
from mlx_specdec.decoding.statistics import Recorder, Stopwatch  # noqa: E402
from mlx_specdec.draft_length.auto_length import AutoLength  # noqa: E402
from mlx_specdec.engine.loading import load  # noqa: E402
from mlx_specdec.engine.pair import Pair  # noqa: E402
from mlx_specdec.engine.request import Job  # noqa: E402
from mlx_specdec.measure.baselines import mlx_lm_file_methods, mlx_lm_methods  # noqa: E402
from mlx_specdec.measure.methods import Method, own_methods, turned  # noqa: E402
from mlx_specdec.measure.throughput import encoded, file_methods  # noqa: E402
from mlx_specdec.models.mlx_lm.context import DecoderOnlyContext  # noqa: E402
from mlx_specdec.options import Options  # noqa: E402
from mlx_specdec.proposers.combined import FirstOf  # noqa: E402
from mlx_specdec.proposers.draft_model import DraftModel  # noqa: E402
from mlx_specdec.text.prompts import read_prompts  # noqa: E402

PARTS: dict[str, Sequence[tuple[Any, str]]] = {
    "graph of the target": [(DecoderOnlyContext, "advance")],
    "graph of the draft": [(DraftModel, "propose")],
    "who drafts": [(FirstOf, "propose"), (FirstOf, "ready"), (FirstOf, "observe")],
    "noise and filters": [(Batch, "noise"), (Batch, "log_probabilities")],
    "verdict": [(Batch, "commit"), (Batch, "with_logprobs")],
    "rewinding": [(DecoderOnlyContext, "rewind"), (DraftModel, "observe")],
    "choosing": [(AutoLength, name) for name in ("choose", "limit", "learn", "on_round")],
    "figures": [(Recorder, "on_round"), (Stopwatch, "finish")],
    "text": [(Job, "part")],
    "submitting": [(mx, "async_eval")],
}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of this thread and wall seconds of a text, its passes and tokens."""

    cpu: float
    wall: float
    passes: int
    tokens: int


def cost(method: Method, prompt: Sequence[int]) -> Cost:
    """Decode one text."""
    wall, cpu = time.perf_counter(), time.thread_time()
    sample = method.run(prompt)
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return Cost(cpu, wall, sample.rounds or len(sample.tokens), len(sample.tokens))


def figures(
    methods: Sequence[Method], short: Sequence[Method], prompts: Sequence[Sequence[int]]
) -> dict[str, tuple[float, float, float]]:
    """Of each method over all prompts, in turns: CPU milliseconds and wall milliseconds a pass, and
    wall microseconds a token, without reading the prompt."""
    sums: dict[str, list[float]] = {each.name: [0.0] * 4 for each in methods}
    pairs = list(zip(methods, short, strict=True))
    for number, prompt in enumerate(prompts):
        for method, reading in turned(pairs, number):
            before, whole = cost(reading, prompt), cost(method, prompt)
            its = sums[method.name]
            its[0] += whole.cpu - before.cpu
            its[1] += whole.wall - before.wall
            its[2] += max(1, whole.passes - before.passes)
            its[3] += max(1, whole.tokens - before.tokens)
    return {
        name: (1e3 * cpu / passes, 1e3 * wall / passes, 1e6 * wall / tokens)
        for name, (cpu, wall, passes, tokens) in sums.items()
    }


@contextmanager
def timers() -> Iterator[dict[str, float]]:
    """CPU seconds of this thread by part, each without the parts inside it."""
    spent: dict[str, float] = defaultdict(float)
    inside: list[float] = []
    saved = [(owner, name, getattr(owner, name)) for its in PARTS.values() for owner, name in its]

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            started = time.thread_time()
            inside.append(0.0)
            try:
                return function(*args, **rest)
            finally:
                took, within = time.thread_time() - started, inside.pop()
                spent[part] += took - within
                if inside:
                    inside[-1] += took

        return call

    for part, its in PARTS.items():
        for owner, name in its:
            setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def show_parts(method: Method, reading: Method, prompts: Sequence[Sequence[int]]) -> None:
    """Print where the thread's time goes, in microseconds a pass, without reading the prompt."""
    passes, cpu = 0, 0.0
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for prompt in prompts:
        for which, sign in ((reading, -1), (method, 1)):
            with timers() as spent:
                its = cost(which, prompt)
            passes, cpu = passes + sign * its.passes, cpu + sign * its.cpu
            for part, took in spent.items():
                parts[part] += sign * took
    parts["everything else"] = cpu - sum(parts.values())
    each = ", ".join(f"{part} {1e6 * took / passes:.0f}" for part, took in parts.items())
    print(f"| {method.name} | {1e6 * cpu / passes:.0f} | {each} |", flush=True)


def show_batches(
    pair: Pair, options: Options, prompts: Sequence[Sequence[int]], size: int, repeats: int
) -> None:
    """Print plain decoding of all prompts in batches, here and in mlx-lm, in turns."""
    own, _ = file_methods(pair, options, "draft", 1, [size])
    methods = [each for each in own if each.family == "plain" and each.batch_size == size]
    methods += mlx_lm_file_methods(pair, options, [size])
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for method in turned(methods, repeat):
            started = time.perf_counter()
            tokens = sum(len(sample.tokens) for _, sample in method.run(prompts))
            rates[method.family].append(tokens / (time.perf_counter() - started))
    ours, theirs = rates.values()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    print(
        f"| {size} | {statistics.median(ours):.0f} | {statistics.median(theirs):.0f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
        flush=True,
    )


def main() -> None:
    """Print a table of methods, one of batches, and one of parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="weights/py-llama")
    parser.add_argument("--draft-model", default="weights/py-llama-draft")
    parser.add_argument("-m", "--max-tokens", type=int, default=100)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--num-draft", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--limit", type=int, default=12, help="of the prompts")
    parser.add_argument("--batch-size", type=int, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pair = load(args.model, args.draft_model)
    options = Options(max_tokens=args.max_tokens, temperature=args.temp, seed=1, num_draft="auto")
    texts, _ = encoded(pair, read_prompts(args.prompts, args.limit), options)
    prompts = list(texts.values())
    lengths = [*args.num_draft, "auto"]

    def both(options: Options) -> list[Method]:
        return [
            *own_methods([pair], options, ["draft"], lengths),
            *mlx_lm_methods(pair, options, lengths),
        ]

    methods, short = both(options), both(replace(options, max_tokens=1))
    runs = [figures(methods, short, prompts) for _ in range(args.repeats)]
    theirs = {each.num_draft: each.name for each in methods if each.family == "mlx-lm"}
    print("| method | CPU ms a pass | wall ms a pass | wall us a token | of mlx-lm: CPU, a token |")
    print("|---|---|---|---|---|")
    for method in methods:
        columns = [[run[method.name][place] for run in runs] for place in range(3)]
        cells = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in columns]
        other = theirs.get(method.num_draft)
        if other and other != method.name:
            ratios = [[run[method.name][p] / run[other][p] for run in runs] for p in (0, 2)]
            cells.append(", ".join(f"{statistics.median(each):.2f}" for each in ratios))
        print(f"| {method.name} | {' | '.join(cells)} |", flush=True)
    if args.batch_size:
        print("\n| at once | ours, tokens/s | mlx-lm | ratio |\n|---|---|---|---|")
    for size in args.batch_size:
        show_batches(pair, options, prompts, size, args.repeats)
    print("\n| method | CPU us a pass | by part |\n|---|---|---|")
    for method, reading in zip(methods, short, strict=True):
        if method.family != "mlx-lm":
            show_parts(method, reading, prompts)


if __name__ == "__main__":
    main()
