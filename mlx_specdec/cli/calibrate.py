"""The calibrate command."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import OptionError
from . import render
from .pairs import SHIPPED_DRAFT, SHIPPED_TARGET, load_pair
from .process import Version


def calibrate(
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--draft-model-name", help="The draft.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--model-name", help="The target.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="Drawing costs time of its own.")
    ] = 0.0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    turns: Annotated[int, typer.Option("--turns", help="Rounds of every length.")] = 8,
    version: Version = False,
) -> None:
    """Measure what rounds of a pair cost on this machine, for --num-draft auto."""
    if turns < 1:
        raise OptionError(f"turns must be 1 or more, not {turns}")
    if model is None:
        draft_model = draft_model or SHIPPED_DRAFT
    pair = load_pair(model or SHIPPED_TARGET, draft_model, dtype=dtype)
    from ..assemble import calibrate as measure

    with render.progress("measuring") as report:
        costs = measure(pair, temperature=temperature, turns=turns, progress=report)
    print(render.costs(costs))
