"""Count how many outputs of the shipped pairs rounding changes.

    python benchmarks/rounding.py [--metal] [--prompts 40] [--tokens 100] [py-llama t5-enfr]

Decodes the same requests plainly, with 3 draft tokens a round, as batches of 4, from a prefix cache
and in a busy server, with and without `Options.exact`, on this device. `--metal` computes in
bfloat16 on a CPU, by kernels that round as Metal's do; see tests/support/simulated_metal.py. The
prompts are the 30 of a file in prompts/, then the same ones cut at two thirds of their length.

Prints one JSON line for each pair, temperature and mode: how many outputs differ from plain
decoding alone, the tokens up to the first differences, how many differences 100,000 tokens have,
and the margins of the choices at the differences, beside the noise of one choice (`margins.py`)."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import system

if __name__ == "__main__":
    system.load_blas()

from benchmarks.margins import compare, noise_of
from mlx_specdec import (
    Options,
    PromptCache,
    Result,
    generate,
    generate_many,
    load,
    stream_generate,
)
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import encode
from mlx_specdec.serve.engine import Engine
from tests.support import simulated_metal
from tests.support.serving import ask
from tests.support.shipped import ROOT
from tests.support.simulated_metal import off_cpu

FILES = {"py-llama": "python.jsonl", "t5-enfr": "translation.jsonl"}
CHUNK = 16
"""Tokens of a chunk of a prompt. With exact the prefix cache reuses whole chunks, and the prompts
are short."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=list(FILES))
    parser.add_argument("--metal", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch:
        if given.metal:
            off_cpu(patch)
            simulated_metal.install(patch)
        for name in given.pairs:
            pair = load(ROOT / "weights" / name, ROOT / "weights" / f"{name}-draft")
            texts = some_prompts(FILES[name], given.prompts)
            device = "simulated Metal" if given.metal else system.device_name()
            for temperature in (0.0, 1.0):
                for exact in (False, True):
                    options = Options(
                        max_tokens=given.tokens,
                        temperature=temperature,
                        seed=3,
                        exact=exact,
                        prefill_step_size=CHUNK,
                        cost_cache=False,
                    )
                    for line in measured(pair, texts, options):
                        print(json.dumps({"pair": name, "device": device, **line}), flush=True)


def some_prompts(file: str, count: int) -> list[str]:
    lines = (ROOT / "prompts" / file).read_text(encoding="utf-8").splitlines()
    whole = [json.loads(line)["prompt"] for line in lines]
    halves = [text[: text.rindex(" ", 0, 2 * len(text) // 3)] for text in whole]
    return [*whole, *halves][:count]


def measured(pair: Pair, texts: Sequence[str], options: Options) -> Iterator[dict[str, object]]:
    """Decode the prompts in each way, and yield a line for each."""
    plain_options, drafted_options = replace(options, regular=True), replace(options, num_draft=3)
    plain = [generate(pair, text, plain_options) for text in texts]
    cache = PromptCache(1 << 30)

    def cached(text: str) -> Result:
        return stream_generate(pair, text, plain_options, cache=cache).result()

    for text in texts:
        cached(text)
    ways = {
        "drafts": [generate(pair, text, drafted_options) for text in texts],
        "batches": generate_many(pair, texts, plain_options, batch_size=4),
        "drafts in batches": generate_many(pair, texts, drafted_options, batch_size=4),
        "cached": [cached(text) for text in texts],
        "served": served(pair, texts, drafted_options),
    }
    for way, results in ways.items():
        tokens, margins = 0, []
        for text, one, other in zip(texts, plain, results, strict=True):
            if one.tokens == other.tokens:
                tokens += len(one.tokens)
                continue
            parting = compare(pair, plain_options, text, one.tokens, other.tokens)
            tokens += parting.position + 1
            margins.append(parting.margin)
        yield {
            "dtype": pair.dtype,
            "temperature": options.temperature,
            "exact": options.exact,
            "way": way,
            "outputs": len(texts),
            "differ": len(margins),
            "tokens": tokens,
            "per 100,000": round(1e5 * len(margins) / tokens, 1),
            "margins": sorted(f"{margin:.1e}" for margin in margins if margin is not None),
            "noise": f"{noise_of(pair, exact=options.exact):.1e}",
        }


def served(pair: Pair, texts: Sequence[str], options: Options) -> list[Result]:
    """Decode the prompts in a server, all at once, beside the same prompts with another seed and
    without `Options.exact`."""
    beside = replace(options, seed=options.seed + 1, exact=False)
    engine = Engine(lambda: (pair, options), batch_size=4)
    engine.ready.wait()
    prompts = [encode(pair, text, options) for text in texts]
    heard = [ask(engine, how, prompt)[1] for prompt in prompts for how in (options, beside)]
    results = [listener.last().result for listener in heard[::2]]
    engine.close()
    engine.join(60)
    return [result for result in results if result is not None or sys.exit("a request failed")]


if __name__ == "__main__":
    main()
