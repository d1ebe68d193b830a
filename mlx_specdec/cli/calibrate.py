"""The calibrate command."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from ..draft_length.saved import directory
from . import render
from .flags import TEMPERATURE, Flags, command, flag
from .loading import Models, load_pair, named


@dataclass(frozen=True)
class Measuring(Flags):
    """How rounds are measured."""

    panel = "Measuring"
    temperature: float = flag(0.0, TEMPERATURE, "--temp")
    turns: int = flag(8, "The number of rounds of every draft length.", min=2)


@command(
    "mlx-specdec calibrate --model weights/py-llama \\",
    "  --draft-model weights/py-llama-draft",
)
def calibrate(models: Models, measuring: Measuring) -> None:
    """Measure what rounds of a pair cost on this machine.

    The costs are kept, and --num-draft auto begins with them.
    """
    pair = load_pair(*named(models), **models.loading())
    from ..measure.calibrate import calibrate as measure

    with render.progress("measuring") as report:
        costs = measure(
            pair, temperature=measuring.temperature, turns=measuring.turns, progress=report
        )
    lines = (f"{n:2d} drafted: {cost:.2f} plain steps\n" for n, cost in costs.items())
    render.write(sys.stdout, "".join(lines))
    place = directory()
    writable = os.access(place, os.W_OK)
    render.tell(f"{'kept' if writable else 'they cannot be kept'} for --num-draft auto in {place}")
