"""Measure published models from GGUF files: plain, with drafts, in mlx-lm, and in llama.cpp.

    python benchmarks/real_models.py SmolLM2-135M-Instruct.Q4_1.gguf prompts/code_edits.jsonl
    python benchmarks/real_models.py TARGET.gguf PROMPTS --draft-model DRAFT.gguf \\
        --llama-cpp ENVIRONMENT/bin/python

All methods decode a prompt one after the other. Their order rotates, so that changes of the
machine's speed affect all methods alike. mlx-lm runs in this process with the same weights.
llama.cpp runs as a server over the same file, by the package xllamacpp in an environment of its
own. It computes with the file's 4-bit weights and 8-bit activations, so its outputs may differ. The
program prints a line of JSON for each method, with medians over the prompts. Only a quiet machine
gives figures worth quoting."""

import argparse
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlx_specdec import Options, generate, load, system
from mlx_specdec.engine.pair import Pair

system.load_blas()

import mlx.core as mx  # noqa: E402
from compare import mlx_lm_methods  # noqa: E402

from mlx_specdec.engine.loading import with_draft_model  # noqa: E402
from mlx_specdec.engine.request import encode  # noqa: E402

SERVER = """
import sys
import xllamacpp

settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.n_ctx, settings.n_gpu_layers = 2048, 0
settings.cpuparams.n_threads = int(sys.argv[2])
server = xllamacpp.Server(settings)
print("listening on", server.listening_address, flush=True)
sys.stdin.read()
"""
THREADS = 2
PATIENCE = 600.0


@dataclass(frozen=True)
class Run:
    """A completion. first: The seconds before the first token. seconds: The seconds of decoding
    after it. passes: The number of the target's passes."""

    tokens: tuple[int, ...]
    first: float
    seconds: float
    passes: int
    nbytes: int


Method = Callable[[list[int]], Run]


def own(pair: Pair, options: Options) -> Method:
    def run(prompt: list[int]) -> Run:
        mx.reset_peak_memory()
        began = time.perf_counter()
        result = generate(pair, prompt, options)
        total, stats = time.perf_counter() - began, result.stats
        seconds = stats.seconds.decoding
        nbytes = stats.peak_memory_bytes
        return Run(result.tokens, total - seconds, seconds, stats.target_passes, nbytes)

    return run


def mlx_lm(pair: Pair, options: Options) -> Method:
    [method] = mlx_lm_methods(pair, options, [])

    def run(prompt: list[int]) -> Run:
        mx.reset_peak_memory()
        began = time.perf_counter()
        sample = method.run(prompt)
        total, count = time.perf_counter() - began, len(sample.tokens)
        nbytes = mx.get_peak_memory()
        return Run(sample.tokens, total - sample.seconds, sample.seconds, count, nbytes)

    return run


@contextmanager
def llama_cpp(python: str, model: str, most: int) -> Iterator[Method]:
    """Serve the file in llama.cpp, and complete prompts there."""
    command = [python, "-c", SERVER, model, str(THREADS)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        [address] = re.findall(r"http\S+", next(line for line in server.stdout if "on" in line))

        def run(prompt: list[int]) -> Run:
            settings = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
            body = json.dumps({"prompt": prompt, "n_predict": most, **settings}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/completion", body, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                found = json.load(answer)
            times, tokens = found["timings"], tuple(found["tokens"])
            first, seconds = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
            return Run(tokens, first, seconds, len(tokens), resident_bytes(server.pid))

        yield run
    finally:
        server.terminate()
        server.wait()


def resident_bytes(process_id: int) -> int:
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(process_id)], capture_output=True)
    return 1024 * int(done.stdout)


def line(name: str, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Return the figures of a method. plain: The runs of plain decoding, with the same prompts in
    the same order as `runs`."""
    speeds = [max(1, len(run.tokens) - 1) / run.seconds for run in runs]
    ratios = [
        one.seconds / len(one.tokens) / (run.seconds / len(run.tokens))
        for run, one in zip(runs, plain, strict=True)
    ]
    return {
        "method": name,
        "tokens_per_second": round(median(speeds), 2),
        "times_plain": round(median(ratios), 3),
        "tokens_per_pass": round(
            sum(len(run.tokens) for run in runs) / sum(run.passes for run in runs), 2
        ),
        "first_token_seconds": round(median(run.first for run in runs), 3),
        "memory_gb": round(max(run.nbytes for run in runs) / 1e9, 2),
        "as_plain": sum(run.tokens == one.tokens for run, one in zip(runs, plain, strict=True)),
        "outputs": len(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft-model", action="append", default=[])
    parser.add_argument("--num-draft", default="3,auto")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has xllamacpp")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    texts = [json.loads(text)["prompt"] for text in given.prompts.read_text("utf-8").splitlines()]
    regular = Options(max_tokens=given.tokens, regular=True, cost_cache=False)
    pair = load(given.model)
    prompts = [encode(pair, text, regular) for text in texts[: given.limit]]
    methods = {"plain": own(pair, regular), "mlx-lm plain": mlx_lm(pair, regular)}
    pairs = {Path(name).name: with_draft_model(pair, name) for name in given.draft_model}
    for length in given.num_draft.split(","):
        number = length if length == "auto" else int(length)
        drafted = replace(regular, regular=False, num_draft=number)
        methods[f"lookup {length}"] = own(pair, replace(drafted, proposer="ngram"))
        # If the length is a number, a draft model drafts alone. If it is auto, prompt lookup drafts
        # as well.
        methods |= {f"{name} {length}": own(both, drafted) for name, both in pairs.items()}
    with ExitStack() as stack:
        if given.llama_cpp:
            served = stack.enter_context(llama_cpp(given.llama_cpp, given.model, given.tokens))
            methods["llama.cpp plain"] = served
        runs: dict[str, list[Run]] = {name: [] for name in methods}
        for repeat in range(given.repeats):
            for number, prompt in enumerate(prompts):
                turn = (repeat + number) % len(methods)
                order = [*methods][turn:] + [*methods][:turn]
                if not runs["plain"]:
                    for name in order:  # the first completion of each method warms up
                        methods[name](prompt)
                for name in order:
                    runs[name].append(methods[name](prompt))
    described = {"model": Path(given.model).name, "prompts": given.prompts.name}
    for name, found in runs.items():
        print(json.dumps({**described, **line(name, found, runs["plain"])}), flush=True)


if __name__ == "__main__":
    main()
