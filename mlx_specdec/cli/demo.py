"""What `generate` says at the end when it was asked for nothing: what speculation gained."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from .. import blas
from . import render

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..decoding.run import Result
    from ..options import Options

TURNS = 3
"""How often each way of decoding is timed, in turns, once both were warm; medians count."""
NEXT_PROMPT = "Where is the station?"


def tell_speedup(pair: Pair, prompt: str, options: Options, first: Result) -> None:
    """Decode the prompt both ways, and compare in one line on standard error."""
    from ..assemble import generate

    plainly = replace(options, regular=True)
    plain = generate(pair, prompt, plainly)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for settings in (plainly, options):
            speed = generate(pair, prompt, settings).stats.tokens_per_second
            speeds[settings.regular].append(speed or 0.0)
    ours, theirs = median(speeds[False]), median(speeds[True])
    if not theirs:
        return
    same = "the same text" if first.tokens == plain.tokens else "another text"
    render.tell(
        f"{ours / theirs:.2f} times as fast as plain decoding ({ours:.0f} against {theirs:.0f} "
        f"tokens/s), {same}; {_next(first)}"
    )


def _next(result: Result) -> str:
    if result.stats.device == "cpu" and blas.is_slow():
        return "what is missing is a fast BLAS: ./scripts/setup.sh --fast-cpu"
    program = "./scripts/run.sh" if Path(sys.argv[0]).name == "main.py" else "mlx-specdec generate"
    return f'next: {program} --show-drafts "{NEXT_PROMPT}"'
