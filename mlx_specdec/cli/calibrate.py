"""The calibrate command."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OptionError
from . import figures, render
from .flags import Flags, command, flag
from .groups import TEMPERATURE, Models
from .pairs import load_pair, named


@dataclass(frozen=True)
class Measuring(Flags):
    """How rounds are measured."""

    panel = "Measuring"
    temperature: float = flag(0.0, TEMPERATURE, "--temp")
    turns: int = flag(8, "The number of rounds of every draft length.")


@command("mlx-specdec calibrate --model weights/py-llama --draft-model weights/py-llama-draft")
def calibrate(models: Models, measuring: Measuring) -> None:
    """Measure what rounds of a pair cost on this machine.

    The costs are kept, and --num-draft auto begins with them.
    """
    turns = measuring.turns
    if turns < 1:
        raise OptionError(f"turns must be 1 or more, not {turns}")
    pair = load_pair(*named(models), **models.loading())
    from ..assemble import calibrate as measure

    with render.progress("measuring") as report:
        costs = measure(pair, temperature=measuring.temperature, turns=turns, progress=report)
    print(figures.costs(costs))
