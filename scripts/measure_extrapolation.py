"""How close `estimate` comes when it measures a few layers: against the whole model, in one run.

    python scripts/measure_extrapolation.py --shape t5-large --turns 5
    python scripts/measure_extrapolation.py --config weights/t5-enfr --depths 2 4

Random weights of a known shape, or of a directory's config.json. The whole model and its two parts
share their weights and are measured in turns; the output is JSON on standard output: every time
extrapolated and measured, and the largest relative error.

Where others use the machine, MKL_NUM_THREADS=1 and --cpu-time measure in this process's CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from mlx_specdec import blas

blas.load()

from mlx_specdec.checkpoints.files import read_config  # noqa: E402
from mlx_specdec.contracts import Model  # noqa: E402
from mlx_specdec.costs.passes import Clock, PassCosts, PassTimer, opened  # noqa: E402
from mlx_specdec.estimate.measure import (  # noqa: E402
    FIRST_SIZES,
    SIZES_BETWEEN,
    extended,
    measure,
    parts,
)
from mlx_specdec.models.outline import outline  # noqa: E402

T5: dict[str, Any] = {"model_type": "t5", "vocab_size": 32128, "d_kv": 64}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "t5-base": {**T5, "d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
    "t5-large": {**T5, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "llama-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}


def compare(guessed: PassCosts, real: PassCosts) -> dict[str, Any]:
    """Every time twice in milliseconds, and V(m) twice."""
    sizes = sorted(guessed.passes.keys() & real.passes.keys())
    pairs = {"step": (guessed.step, real.step)}
    pairs["draft step"] = (guessed.draft or 0.0, real.draft or 0.0)
    pairs |= {f"pass over {m}": (guessed.passes[m], real.passes[m]) for m in sizes}
    curves = {
        f"V({m})": (guessed.passes[m] / guessed.step, real.passes[m] / real.step) for m in sizes
    }
    return {
        "milliseconds": {name: [round(1000 * s, 3) for s in both] for name, both in pairs.items()},
        "in_plain_steps": {name: [round(v, 3) for v in both] for name, both in curves.items()},
        "largest_error_of_times": round(worst(pairs), 4),
        "largest_error_of_curve": round(worst(curves), 4),
    }


def timer(model: Model, prompt: int, clock: Clock) -> PassTimer:
    """For everything that is measured of a target and of a draft."""
    context = opened(model, [7919 * place % model.vocabulary for place in range(1, prompt + 1)])
    sizes = (*FIRST_SIZES, *SIZES_BETWEEN)
    return PassTimer(context, sizes=sizes, draft=context, steps=True, clock=clock)


def worst(pairs: dict[str, tuple[float, float]]) -> float:
    """Largest relative error of the first of each two numbers."""
    return max(abs(guessed / real - 1) for guessed, real in pairs.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", choices=sorted(SHAPES))
    source.add_argument("--config", type=Path, help="a directory with config.json")
    parser.add_argument("--depths", type=int, nargs=2, help="instead of those estimate would take")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--q-bits", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cpu-time", action="store_true", help="instead of wall time")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    config = SHAPES[args.shape] if args.shape else read_config(args.config)
    name = args.shape or str(args.config)
    how: dict[str, Any] = {"dtype": args.dtype, "q_bits": args.q_bits}
    whole = outline(config, name, **how)
    depths = tuple(args.depths) if args.depths else parts(whole, whole=0)
    if depths is None:
        sys.exit(f"{name} would be measured whole: give --depths")
    models = [whole.model()]
    for depth in depths:
        models.append(outline(config, name, **how, depth=depth).model(given=whole.weights()))
    timers = [timer(model, args.prompt_tokens, clock) for model in models]
    deadline = clock() + args.seconds
    measure(timers, turns=args.turns, deadline=deadline, clock=clock, progress=report)
    real, few, more = (costs for one in timers if (costs := one.costs()) is not None)
    layers = len(whole.layers)
    result = {
        "model": name,
        "dtype": whole.dtype,
        "bytes": whole.nbytes,
        "layers": layers,
        "measured_layers": list(depths),
        "blas": blas.name(),
        "clock": clock.__name__,
        **compare(extended(few, more, depths, layers), real),
    }
    print(json.dumps(result, indent=2))


def report(done: int, total: int) -> None:
    """Progress on standard error."""
    print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
