"""Measure what mac.sh asks about a machine, one question in each call:

    python scripts/mac_checks.py rows|float32|submission|sorting|streams [--small]

Every line on standard output is one JSON object. It is printed as soon as it is measured, so that
nothing is lost if mac.sh ends the program. mac_summary.py puts the lines into words.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlx_specdec import system

system.load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

ROOT = Path(__file__).parents[1]
MODELS = ["weights/py-llama", "weights/py-llama-draft"]
FORMATS = {
    "float32": (mx.float32, None),
    "float16": (mx.float16, None),
    "bfloat16": (mx.bfloat16, None),
    "8-bit, groups of 64": (mx.bfloat16, (8, 64)),
    "8-bit, groups of 32": (mx.bfloat16, (8, 32)),
    "4-bit, groups of 64": (mx.bfloat16, (4, 64)),
    "4-bit, groups of 32": (mx.bfloat16, (4, 32)),
}
"""Type of the activations, and bits and group size of quantized weights."""
MATRICES = ((2048, 2048), (4096, 4096), (4096, 11008), (11008, 4096))
"""Inner and outer sizes. Metal's kernels change with both, and with the number of rows."""
PRODUCT_ROWS, ATTENTION_ROWS = 12, 8
"""Most rows of a pass. Metal's attention kernel for few rows takes at most 8."""
KV_HEADS = 4
GROUPS, WIDTHS, KEYS = (1, 4, 8), (64, 128, 256), (512, 1024, 2000, 4096, 8192)
"""Query heads of one key head, head sizes, and keys that the first row sees."""
SETTINGS = {
    "default": {},
    "every 4 layers": {"MLX_SPECDEC_SUBMIT_EVERY": "4"},
    "every 8 layers": {"MLX_SPECDEC_SUBMIT_EVERY": "8"},
    "larger buffers": {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
}
"""Environment variables of each setting. MLX's default is to submit after 20 to 50 operations, or
40 to 50 MB, by the kind of chip."""
VOCABULARY = 151_936
"""Entries of Qwen's logits."""
WIRED = """
import runpy
from mlx_specdec import system
system.load_blas()
import mlx.core as mx
if mx.metal.is_available():
    mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
runpy.run_module("mlx_specdec", run_name="__main__", alter_sys=True)
"""
"""A program that starts mlx-specdec after it has set the highest wired limit, as mlx-lm does."""


# ------------------------------------------------------------------ bits of rows


def compare(passes: dict[int, mx.array], alone: mx.array, in_two: mx.array) -> dict[str, list[int]]:
    """Return the numbers of rows whose passes have the bits of smaller passes.

    Args:
        passes: Results of each pass by its number of rows m, shape (m, width).
        alone: Each row as a pass of one row computes it, shape (most rows, width).
        in_two: Each row as the first one of a pass of two rows, same shape.
    """

    def same(one: mx.array, other: mx.array) -> bool:
        kind = mx.uint32 if one.itemsize == 4 else mx.uint16
        return bool(mx.array_equal(mx.contiguous(one).view(kind), mx.contiguous(other).view(kind)))

    return {
        "row_0_as_one_row": [m for m, got in passes.items() if same(got[:1], alone[:1])],
        "row_0_as_two_rows": [m for m, got in passes.items() if same(got[:1], in_two[:1])],
        "rows_as_one_row": [m for m, got in passes.items() if same(got, alone[:m])],
        "rows_as_two_rows": [m for m, got in passes.items() if same(got, in_two[:m])],
    }


def product_bits(name: str, inner: int, outer: int) -> dict[str, Any]:
    """Compare products of 2 to 12 equal rows with a matrix, shape (outer, inner)."""
    dtype, quantization = FORMATS[name]
    weight = mx.random.normal((outer, inner), dtype=dtype, key=mx.random.key(0))
    row = mx.random.normal((1, 1, inner), dtype=dtype, key=mx.random.key(1))
    if quantization:
        bits, size = quantization
        packed = mx.quantize(weight, group_size=size, bits=bits)

    def product(m: int) -> mx.array:
        x = mx.contiguous(mx.broadcast_to(row, (1, m, inner)))
        if quantization:
            return mx.quantized_matmul(x, *packed, group_size=size, bits=bits)[0]
        return (x @ weight.T)[0]

    passes = {m: product(m) for m in range(1, PRODUCT_ROWS + 1)}
    alone, in_two = (mx.repeat(passes[m][:1], PRODUCT_ROWS, axis=0) for m in (1, 2))
    del passes[1]
    return {"shape": [inner, outer], **compare(passes, alone, in_two)}


def attention_bits(name: str, group: int, width: int, keys: int) -> dict[str, Any]:
    """Compare causal attention of 2 to 8 equal rows. Row i sees keys + i keys in every pass."""
    dtype, heads = FORMATS[name][0], KV_HEADS * group
    row = mx.random.normal((1, 1, heads, width), dtype=dtype, key=mx.random.key(0))
    shape = (1, KV_HEADS, keys + ATTENTION_ROWS, width)
    k, v = (mx.random.normal(shape, dtype=dtype, key=mx.random.key(n)) for n in (1, 2))

    def operands(m: int, first: int) -> tuple[mx.array, mx.array, mx.array]:
        # As models do: heads come last until the transposition.
        q = mx.contiguous(mx.broadcast_to(row, (1, m, heads, width))).transpose(0, 2, 1, 3)
        end = keys + first + m - 1
        return q, k[..., :end, :], v[..., :end, :]

    def flat(done: mx.array) -> mx.array:
        return done.transpose(0, 2, 1, 3).reshape(done.shape[2], -1)

    def call(q: mx.array, k: mx.array, v: mx.array, mask: str | None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=mask)

    def one_pass(m: int, first: int = 0) -> mx.array:
        return flat(call(*operands(m, first), "causal" if m > 1 else None))

    def divided(m: int) -> mx.array:
        q, k, v = operands(m, 0)
        seen = [slice(keys + row) for row in range(m)]
        calls = [
            call(q[:, :, row : row + 1], k[..., to, :], v[..., to, :], None)
            for row, to in enumerate(seen)
        ]
        return flat(mx.concatenate(calls, axis=2))

    several = range(2, ATTENTION_ROWS + 1)
    firsts = range(ATTENTION_ROWS)
    alone, in_two = (mx.concatenate([one_pass(m, first)[:1] for first in firsts]) for m in (1, 2))
    found = compare({m: one_pass(m) for m in several}, alone, in_two)
    apart = compare({m: divided(m) for m in several}, alone, in_two)
    return {
        "group": group,
        "head_dim": width,
        "keys": keys,
        **found,
        "divided_rows_as_one_row": apart["rows_as_one_row"],
    }


def rows(small: bool) -> Iterator[dict[str, Any]]:
    """Yield for each format and shape which passes have the bits of one row and of two."""
    for name in FORMATS:
        for inner, outer in ((256, 512),) if small else MATRICES:
            found = product_bits(name, inner, outer)
            yield {"kind": "rows", "operation": "product", "format": name, **found}
        mx.clear_cache()
    for name in ("float32", "float16", "bfloat16"):
        for keys in KEYS[:1] if small else KEYS:
            for width in WIDTHS[:1] if small else WIDTHS:
                for group in GROUPS:
                    found = attention_bits(name, group, width, keys)
                    yield {"kind": "rows", "operation": "attention", "format": name, **found}
        mx.clear_cache()


# ------------------------------------------------------------------ other processes


def asked(question: str, small: bool, **environment: str) -> dict[str, Any]:
    """Return what this program answers in another process with these environment variables."""
    command = [sys.executable, __file__, question, *(["--small"] if small else [])]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def float32_error(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the relative error of a float32 product of 5 rows, and of one, against float64."""
    size = 256 if small else 2048
    dice = np.random.default_rng(0)
    x, weight = dice.standard_normal((5, size)), dice.standard_normal((size, size))
    left, right = x.astype(np.float32), weight.astype(np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    errors = {}
    for count in (1, 5):
        got = np.array(mx.array(left[:count]) @ mx.array(right))
        errors[count] = np.linalg.norm(got - exact[:count]) / np.linalg.norm(exact[:count])
    yield {"one_row_error": float(errors[1]), "error": float(errors[5])}


def float32(small: bool) -> Iterator[dict[str, Any]]:
    """Yield that error without and with MLX's TF32 arithmetic."""
    for setting in ("0", "1"):
        found = asked("float32-error", small, MLX_ENABLE_TF32=setting)
        yield {"kind": "float32", "tf32": setting == "1", **found}


def decoding(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of a token in plain and in drafted decoding of the shipped Python pair."""
    from mlx_specdec import Options, generate, load

    count, tokens = (1, 8) if small else (3, 96)
    lines = (ROOT / "prompts" / "python.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:count]]
    pair = load(*(str(ROOT / model) for model in MODELS))
    ways = {
        "plain_ms": Options(max_tokens=tokens, regular=True, cost_cache=False),
        "drafted_ms": Options(max_tokens=tokens, proposer="draft", num_draft=3, cost_cache=False),
    }
    seconds, emitted = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    # The first text warms up.
    for number, prompt in enumerate([prompts[0], *prompts]):
        for way, options in ways.items():
            result = generate(pair, prompt, options)
            if number:
                seconds[way] += result.stats.seconds.decoding
                emitted[way] += len(result.tokens)
    yield {way: round(1e3 * seconds[way] / emitted[way], 4) for way in ways}


def submission(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of decoding in each setting, a process each, in order and then backwards."""
    order = list(SETTINGS)
    for setting in order[:2] if small else order + order[::-1]:
        found = asked("decoding", small, **SETTINGS[setting])
        yield {"kind": "submission", "setting": setting, **found}


# ------------------------------------------------------------------ sorting


def sorting(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of sorting and of the filters over a large vocabulary, in milliseconds."""
    from measure_kernels import seconds

    from mlx_specdec.core.distribution import keep_top_k, keep_top_p

    turns = 3 if small else 21
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "sort": lambda logits: mx.sort(logits, axis=-1),
        "topk 40": lambda logits: mx.topk(logits, 40, axis=-1),
        "argpartition 40": lambda logits: mx.argpartition(logits, -40, axis=-1),
        "keep_top_k 40": lambda logits: keep_top_k(logits, 40),
        "keep_top_p 0.9": lambda logits: keep_top_p(logits, 0.9),
    }
    for count in (1, 5):
        logits = 3 * mx.random.normal((count, VOCABULARY), key=mx.random.key(0))
        mx.eval(logits)
        taken = {
            name: round(1e3 * seconds(partial(way, logits), turns), 4) for name, way in ways.items()
        }
        yield {"kind": "sorting", "rows": count, "ms": taken}


# ------------------------------------------------------------------ two streams


def output(*command: str) -> str:
    """Return the last line that a command prints, and nothing if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[-1].strip()


def streams(small: bool, seconds: float, wired: bool) -> Iterator[dict[str, Any]]:
    """Yield how two clients fared that stream completions from one server for some seconds.

    Every prompt is new and the prompt cache is small, so that the server evicts all the time.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from load_server import PROMPTS, ask
    from served import Served, serving

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = ["-c", WIRED] if wired else ["-m", "mlx_specdec"]
    flags = ["--no-cost-cache", "--prompt-cache-bytes", "32MB", "--port", str(port)]
    models = ["--model", MODELS[0], "--draft-model", MODELS[1]]
    os.environ["MLX_SPECDEC_WIRED"] = "0"  # WIRED sets the limit itself
    finished, tokens, problems = [0, 0], [0, 0], list[str]()

    def memory(served: Served) -> dict[str, Any]:
        mac = platform.system() == "Darwin"
        process_id = str(served.process.pid)
        return {
            "resident_bytes": served.resident_bytes(),
            # On a Mac GPU memory counts in the footprint only.
            "footprint": output("top", "-l", "1", "-pid", process_id, "-stats", "mem") * mac,
            "swap": output("sysctl", "-n", "vm.swapusage") * mac,
        }

    def stream(client: int, end: float) -> None:
        number = client
        while time.monotonic() < end:
            prompt = f"# file {number}\n" + 3 * PROMPTS[-1] + PROMPTS[number % len(PROMPTS)]
            body = {"prompt": prompt, "max_tokens": 16 if small else 128, "temperature": 0}
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            heard = ask(served, {**body, **usage})
            if heard.problem or not heard.text:
                problems.append(f"client {client + 1}: {heard.problem or 'an empty text'}")
                return
            finished[client] += 1
            tokens[client] += heard.tokens
            number += 2

    with serving([sys.executable, *start, "serve", *models, *flags], port) as served:
        before, end = memory(served), time.monotonic() + seconds
        threads = [threading.Thread(target=stream, args=(client, end)) for client in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        code = served.process.poll()
        yield {
            "kind": "streams",
            "wired": wired,
            "seconds": seconds,
            "texts": finished,
            "tokens": tokens,
            "problems": problems,
            "server_ended_with": code,
            "memory_before": before,
            "memory_after": memory(served) if code is None else None,
        }


QUESTIONS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "rows": rows,
    "float32": float32,
    "float32-error": float32_error,
    "submission": submission,
    "decoding": decoding,
    "sorting": sorting,
    "streams": streams,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, for a machine with no GPU"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of streams")
    parser.add_argument("--wired", action="store_true", help="streams with the wired limit on")
    args = parser.parse_args()
    of_streams = {"seconds": args.seconds, "wired": args.wired}
    more = of_streams if args.question == "streams" else {}
    for found in QUESTIONS[args.question](args.small, **more):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
