"""Check a GPU in a few minutes: do drafts, batches and the server keep the text? What is gained?

    python benchmarks/gpu_check.py OUTPUT [STEP ...]

Every step is a process of its own with a time limit, and writes OUTPUT/STEP.txt. If a step fails or
is ended, the next one runs all the same. Without names, all steps run. The steps with SmolLM2 need
`./scripts/real_models.sh smollm2`. MLX's CUDA back end compiles kernels at their first use, those
of quantized products for almost a minute each: MLX_PTX_CACHE_DIR names a directory that keeps
them."""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_specdec import system

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (sys.executable,)
RUN = (*PYTHON, "-m", "mlx_specdec")
BENCH = ("--limit", "5", "--repeats", "2", "-m", "64", "--no-cost-cache", "--json")
LENGTHS = ("--num-draft", "1,2,3,5,8,auto")
WHOLE = ("--dtype", "bfloat16", "--expand-weights")
SMOLLM2 = str(system.cache_directory("real-models") / "SmolLM2-135M-Instruct.Q4_1.gguf")
TRANSLATION = (*RUN, "bench", "prompts/translation.jsonl", *BENCH, *LENGTHS)
CODE = (*RUN, "bench", "prompts/python.jsonl", *BENCH, *LENGTHS, "--model", "weights/py-llama")
DRAFTERS = ("--draft-model", "weights/py-llama-draft", "--draft-model", "weights/py-llama-dspark")
EDITS = (*RUN, "bench", "prompts/code_edits.jsonl", *BENCH, *LENGTHS, "--model", SMOLLM2)
LOAD = ("benchmarks/load_server.py", "--requests", "40", "--clients", "8")
TESTS = ("-m", "pytest", "-m", "not slow", "-q", "--maxfail=12", "tests/core", "tests/rules")
STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "device": (40, (*PYTHON, __file__, "--only", "device")),
    "bench-python": (90, (*CODE, *DRAFTERS, *WHOLE)),
    "bench-translation": (60, (*TRANSLATION, *WHOLE)),
    "bench-python-8bit": (90, (*CODE, *DRAFTERS)),
    "bench-translation-8bit": (90, TRANSLATION),
    "same-py-llama": (240, (*PYTHON, __file__, "--only", "py-llama")),
    "same-t5-enfr": (240, (*PYTHON, __file__, "--only", "t5-enfr")),
    "same-smollm2": (240, (*PYTHON, "scripts/mac_real.py", SMOLLM2)),
    "bench-smollm2": (90, (*EDITS, "--proposer", "ngram", *WHOLE)),
    "server": (240, (*PYTHON, *LOAD)),
    "kernels": (60, (*PYTHON, "scripts/measure_kernels.py", "--seconds", "45")),
    "tests": (120, (*PYTHON, *TESTS)),
}
"""Name -> time limit in seconds, and the command."""
DRAFTS: dict[str, dict[str, tuple[str | None, str]]] = {
    "py-llama": {
        "draft": ("py-llama-draft", "draft"),
        "dspark": ("py-llama-dspark", "dspark"),
        "lookup": (None, "ngram"),
        "medusa": (None, "medusa"),
    },
    "t5-enfr": {
        "draft": ("t5-enfr-draft", "draft"),
        "lookup": (None, "ngram"),
        "medusa": (None, "medusa"),
    },
}
"""Target -> name of a way to draft -> draft model and proposer."""
PROMPTS = {"py-llama": "python.jsonl", "t5-enfr": "translation.jsonl"}
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "expand_weights": True},
    "4-bit": {"q_bits": 4},
    "8-bit": {},
}
COUNT, TOKENS = 8, 64
"""Number of prompts, and of tokens of each."""


def device() -> None:
    import mlx.core as mx

    info = {name: str(value) for name, value in mx.device_info().items()}
    found = {"name": system.device_name(), "info": info, "usable": system.usable_memory()}
    print(json.dumps(found), flush=True)


def same(target: str) -> None:
    """Print a line for each number format, temperature and way to draft."""
    lines = (ROOT / "prompts" / PROMPTS[target]).read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:COUNT]]
    with tempfile.TemporaryDirectory() as directory:
        # The shipped models have 8 bits. Only whole weights are quantized on load.
        whole = Path(directory) / target
        convert = (*RUN, "convert", "--model", f"weights/{target}", "--mlx-path", str(whole))
        subprocess.run((*convert, "-d"), cwd=ROOT, check=True)
        for name, numbers in FORMATS.items():
            for line in compared(target, whole, prompts, numbers):
                print(json.dumps({"target": target, "format": name, **line}), flush=True)


def compared(
    target: str, whole: Path, prompts: list[str], numbers: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Compare every way to draft with plain decoding. whole: The dequantized target."""
    from margins import compare

    from mlx_specdec import Options, generate, generate_many, load

    weights = ROOT / "weights"
    base = whole if "q_bits" in numbers else weights / target
    plain_pair = load(base, **numbers)
    pairs = {}
    for name, (draft, proposer) in DRAFTS[target].items():
        if name == "medusa" and base == weights / target:
            pairs[name] = load(weights / f"{target}-medusa", **numbers), proposer
        elif name != "medusa" and draft is None:
            pairs[name] = plain_pair, proposer
        elif draft is not None:
            pairs[name] = load(base, weights / draft, **numbers), proposer
    for temperature in (0.0, 1.0):
        settings = {"max_tokens": TOKENS, "temperature": temperature, "seed": 3}
        regular = Options(**settings, regular=True)
        texts = {
            exact: [
                generate(plain_pair, prompt, replace(regular, exact=exact)) for prompt in prompts
            ]
            for exact in (False, True)
        }
        ways: dict[str, list[Any]] = {}
        for exact in (False, True):
            options = replace(regular, exact=exact)
            batched = generate_many(plain_pair, prompts, options, batch_size=COUNT)
            ways["batch of 8, exact" if exact else "batch of 8"] = list(batched)
        for name, (pair, proposer) in pairs.items():
            for exact in (False, True):
                options = Options(**settings, num_draft=3, proposer=proposer, exact=exact)
                results = [generate(pair, prompt, options) for prompt in prompts]
                ways[f"{name}, exact" if exact else name] = results
        for name, results in ways.items():
            exact, differing = name.endswith("exact"), []
            how = replace(regular, exact=exact)
            for prompt, one, other in zip(prompts, texts[exact], results, strict=True):
                if one.tokens != other.tokens:
                    parting = compare(plain_pair, how, prompt, one.tokens, other.tokens)
                    differing.append((parting.position, parting.margin, parting.tie))
            yield {
                "temperature": temperature,
                "way": name,
                "equal": len(prompts) - len(differing),
                "differing": differing,
                "tokens": sum(len(one.tokens) for one in results),
                "drafted": sum(one.stats.drafted for one in results),
                "accepted": sum(one.stats.accepted for one in results),
                "seconds": round(sum(one.stats.seconds.decoding for one in results), 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", default=Path("gpu-check"))
    parser.add_argument("steps", nargs="*", default=[*STEPS], metavar="STEP")
    parser.add_argument("--only", choices=["device", *DRAFTS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        return device() if given.only == "device" else same(given.only)
    given.output.mkdir(parents=True, exist_ok=True)
    for name in given.steps:
        limit, command = STEPS[name]
        began, code = time.monotonic(), "time limit"
        with (given.output / f"{name}.txt").open("w") as file:
            running = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
            try:
                code = str(running.wait(limit))
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGINT)  # bench then prints what it has measured
                try:
                    running.wait(30)
                except subprocess.TimeoutExpired:
                    running.kill()
        print(f"{name}: {code}, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
