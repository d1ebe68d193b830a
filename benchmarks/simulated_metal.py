"""Count how many outputs of the shipped pairs are equal if kernels round as Metal's do.

    python benchmarks/simulated_metal.py [--prompts 40] [--tokens 100] [py-llama t5-enfr smollm2]

The prompts are the 30 of a file in prompts/, then the same ones cut at two thirds of their length.
Decodes prompts plainly, with 3 draft tokens a round, and as a batch, in bfloat16 on the simulated
kernels of tests/support/simulated_metal.py, with and without `Options.exact`. Prints one JSON line
for each pair, temperature and mode. SmolLM2 drafts by lookup, and is measured if it is named and
`./scripts/real_models.sh smollm2` has downloaded it."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.margins import score
from mlx_specdec import Options, Result, generate, generate_many, load, system
from mlx_specdec.engine.pair import Pair
from tests.support import simulated_metal
from tests.support.shipped import ROOT
from tests.support.simulated_metal import off_cpu

FILES = {"py-llama": "python.jsonl", "t5-enfr": "translation.jsonl", "smollm2": "code_edits.jsonl"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=["py-llama", "t5-enfr"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch:
        off_cpu(patch)
        simulated_metal.install(patch)
        for name in given.pairs:
            for temperature in (0.0, 1.0):
                for exact in (False, True):
                    measure(name, temperature, given.prompts, given.tokens, exact=exact)


def some_prompts(file: str, count: int) -> list[str]:
    lines = (ROOT / "prompts" / file).read_text(encoding="utf-8").splitlines()
    whole = [json.loads(line)["prompt"] for line in lines]
    halves = [text[: text.rindex(" ", 0, 2 * len(text) // 3)] for text in whole]
    return [*whole, *halves][:count]


def tied_positions(
    pair: Pair, options: Options, texts: Sequence[str], results: Sequence[Result]
) -> int:
    """Count the tokens of all outputs whose choice was a tie within one rounding."""
    outputs = zip(texts, results, strict=True)
    scored = [score(pair, options, text, result.tokens) for text, result in outputs]
    return sum(sum(margins.ties) for margins in scored if margins is not None)


def measure(name: str, temperature: float, count: int, tokens: int, *, exact: bool) -> None:
    """Decode the prompts of a pair in three ways, and print how many outputs are equal."""
    if name == "smollm2":
        model = system.cache_directory("real-models") / "SmolLM2-135M-Instruct.Q4_1.gguf"
        pair = load(model, dtype="bfloat16", expand_weights=True)
    else:
        pair = load(ROOT / "weights" / name, ROOT / "weights" / f"{name}-draft")
    texts = some_prompts(FILES[name], count)
    shared = {"max_tokens": tokens, "temperature": temperature, "seed": 3, "exact": exact}
    plain_options = Options(**shared, num_draft=0)
    drafted_options = Options(**shared, num_draft=3)
    began = time.perf_counter()
    plain = [generate(pair, text, plain_options) for text in texts]
    drafted = [generate(pair, text, drafted_options) for text in texts]
    batched = generate_many(pair, texts, drafted_options, batch_size=4)
    line = {
        "pair": name,
        "dtype": pair.dtype,
        "temperature": temperature,
        "exact": exact,
        "outputs": count,
        "drafted equal": sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        "batched equal": sum(a.tokens == b.tokens for a, b in zip(plain, batched, strict=True)),
        "tokens": sum(len(result.tokens) for result in plain),
        "tied positions": tied_positions(pair, plain_options, texts, plain),
        "seconds": round(time.perf_counter() - began),
    }
    print(json.dumps(line), flush=True)


main()
