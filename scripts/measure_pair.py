"""Measure what `mlx-specdec bench` does not: peers, hopeless drafts, and the parts of a round.

    python scripts/measure_pair.py speed --peers --model weights/py-llama \
        --draft-model weights/py-llama-draft --prompts prompts.txt --limit 200

`speed` compares lengths of drafts with plain decoding, and with --peers with the generators of
mlx-lm; `hopeless` does so with a draft of shuffled weights; `shares` measures what share of a round
the draft, the target and everything else take. One prompt a line; `\\n` in a line stands for a line
break. Every figure is taken in this one process, methods interleaved prompt by prompt; the output
is JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_specdec import Options
from mlx_specdec import process as blas

blas.load()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_map  # noqa: E402

from mlx_specdec.engine.generate import stream_generate  # noqa: E402
from mlx_specdec.engine.loading import load  # noqa: E402
from mlx_specdec.engine.pair import Pair  # noqa: E402

LENGTHS = (1, 3, 5, 8)


@dataclass(frozen=True)
class Timing:
    """One text: tokens, seconds after the prompt pass, verdicts (plain steps included)."""

    tokens: int
    seconds: float
    rounds: int


def read_prompts(file: Path, limit: int, prefix: str) -> list[str]:
    """The first `limit` lines, each behind `prefix`."""
    lines = file.read_text(encoding="utf-8").splitlines()[:limit]
    return [prefix + line.replace("\\n", "\n") for line in lines if line.strip()]


def options(args: argparse.Namespace, **changes: Any) -> Options:
    """Options of one method."""
    return Options(max_tokens=args.max_tokens, chat_template=False, **changes)


def speed(pair: Pair, prompts: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens per second of plain and speculative decoding, and the ratio's quartiles."""
    for temperature in (0.0, 1.0):
        methods: dict[str, Callable[[str], Timing]] = {
            "plain": lambda prompt, t=temperature: timed(
                pair, prompt, options(args, regular=True, temperature=t)
            )
        }
        for length in args.lengths:
            methods[f"num_draft {length}"] = lambda prompt, n=length, t=temperature: timed(
                pair, prompt, options(args, num_draft=n, temperature=t)
            )
        methods["num_draft auto"] = lambda prompt, t=temperature: timed(
            pair, prompt, options(args, num_draft="auto", temperature=t)
        )
        if args.peers:
            methods.update(peers(pair, args, temperature))
        yield from compare(methods, prompts, temperature)


def hopeless(pair: Pair, prompts: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """As `speed`, auto against plain decoding, with a draft of random weights and without EOS."""
    assert pair.draft is not None
    mx.random.seed(0)
    network = pair.draft.network  # type: ignore[attr-defined]
    network.update(tree_map(shuffled, network.parameters()))
    mx.eval(network.parameters())
    endless = replace(pair, eos_token_ids=frozenset())
    for temperature in (0.0, 1.0):
        methods: dict[str, Callable[[str], Timing]] = {}
        for name, changes in (
            ("plain", {"regular": True}),
            ("auto", {}),
            ("auto, nothing known", {"cost_cache": False}),
            ("num_draft 3", {"num_draft": 3}),
        ):
            method = options(args, temperature=temperature, **changes)
            methods[name] = lambda prompt, method=method: timed(endless, prompt, method)
        yield from compare(methods, prompts, temperature)


def shuffled(array: mx.array) -> mx.array:
    """The same numbers in another order."""
    return mx.random.permutation(array.flatten()).reshape(array.shape)


def timed(pair: Pair, prompt: str, method: Options) -> Timing:
    """One text of ours."""
    result = stream_generate(pair, prompt, method).result()
    seconds = result.stats.seconds
    decoding = seconds.total - seconds.load - seconds.prompt
    return Timing(len(result.tokens), decoding, result.stats.rounds)


def peers(
    pair: Pair, args: argparse.Namespace, temperature: float
) -> dict[str, Callable[[str], Timing]]:
    """mlx-lm's plain and speculative decoding of the same weights in the same process: bare
    generators of tokens, and "text", which streams text as a user gets it (and as ours does)."""
    from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    tokenizer = load_tokenizer(Path(args.model))

    sampler = make_sampler(temp=temperature)

    target, draft = pair.target.network, pair.draft.network if pair.draft else None

    def drain(steps: Iterator[Any]) -> Timing:
        # Both generators run the prompt pass before they yield the first token.
        next(steps)
        started, count, rounds = time.perf_counter(), 0, 0
        for token, _, *drafted in steps:
            count += 1
            rounds += not any(drafted)
            if int(token) in pair.eos_token_ids:
                break
        return Timing(count, time.perf_counter() - started, rounds)

    def plain(prompt: str) -> Timing:
        ids = mx.array(pair.tokenizer.encode(prompt))
        return drain(generate_step(ids, target, max_tokens=args.max_tokens, sampler=sampler))

    def text(prompt: str) -> Timing:
        ids = pair.tokenizer.encode(prompt)
        steps = stream_generate(target, tokenizer, ids, max_tokens=args.max_tokens, sampler=sampler)
        return drain((step.token, None) for step in steps)

    def speculative(prompt: str, length: int) -> Timing:
        ids = mx.array(pair.tokenizer.encode(prompt))
        return drain(
            speculative_generate_step(
                ids,
                target,
                draft,
                num_draft_tokens=length,
                max_tokens=args.max_tokens,
                sampler=sampler,
            )
        )

    methods: dict[str, Callable[[str], Timing]] = {"mlx-lm plain": plain, "mlx-lm plain text": text}
    if draft is not None:
        for length in args.lengths:
            methods[f"mlx-lm num_draft {length}"] = lambda prompt, n=length: speculative(prompt, n)
    return methods


def compare(
    methods: dict[str, Callable[[str], Timing]], prompts: list[str], temperature: float
) -> Iterator[dict[str, Any]]:
    """Run all methods round robin over the prompts; ratios are to the first one, per prompt."""
    rates: dict[str, list[float]] = {name: [] for name in methods}
    totals = dict.fromkeys(methods, (0, 0))
    for method in methods.values():
        method(prompts[0])
    for index, prompt in enumerate(progress(prompts, f"speed, T={temperature}")):
        names = list(methods)
        names = names[index % len(names) :] + names[: index % len(names)]
        for name in names:
            timing = methods[name](prompt)
            rates[name].append(timing.tokens / timing.seconds if timing.tokens else 0.0)
            totals[name] = totals[name][0] + timing.tokens, totals[name][1] + timing.rounds
    base = rates[next(iter(methods))]
    for name, values in rates.items():
        ratios = sorted(value / plain for value, plain in zip(values, base, strict=True) if plain)
        yield {
            "temperature": temperature,
            "method": name,
            "median_tokens_per_second": round(statistics.median(values), 1),
            "median_ratio_to_plain": round(statistics.median(ratios), 3),
            "tokens_per_pass": round(totals[name][0] / max(1, totals[name][1]), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        }


def shares(pair: Pair, prompts: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Share of a round outside the two models' passes, every round timed in parts."""
    for temperature in (0.0, 1.0):
        for length in args.lengths:
            draft = verify = total = 0.0
            for prompt in progress(prompts, f"shares, T={temperature} n={length}"):
                timing = options(args, num_draft=length, temperature=temperature)
                seconds = stream_generate(pair, prompt, timing, timed="all").result().stats.seconds
                draft += seconds.draft or 0.0
                verify += seconds.verify or 0.0
                total += seconds.decoding
            yield {
                "temperature": temperature,
                "num_draft": length,
                "draft": round(draft / total, 4),
                "verify": round(verify / total, 4),
                "other": round(1 - (draft + verify) / total, 4),
            }


def progress(prompts: list[str], label: str) -> Iterator[str]:
    """The prompts, with a line of progress and time left on standard error."""
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        yield prompt
        if (index + 1) % 25 == 0 or index + 1 == len(prompts):
            left = (time.perf_counter() - started) / (index + 1) * (len(prompts) - index - 1)
            print(f"{label}: {index + 1}/{len(prompts)}, {left:.0f} s left", file=sys.stderr)


def main() -> None:
    """Read the flags, load the pair, print JSON."""
    measures = {"speed": speed, "hopeless": hopeless, "shares": shares}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measure", choices=measures)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", help="none where the model is Medusa heads")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--peers", action="store_true", help="also mlx-lm, for Llama pairs")
    args = parser.parse_args()
    pair = load(args.model, args.draft_model)
    prompts = read_prompts(args.prompts, args.limit, args.prefix)
    rows = []
    for row in measures[args.measure](pair, prompts, args):
        rows.append(row)
        print(json.dumps({**row, "differences": len(row.get("differences", []))}), file=sys.stderr)
    print(json.dumps({"measure": args.measure, "blas": blas.name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
