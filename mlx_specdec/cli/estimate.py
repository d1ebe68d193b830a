"""The estimate command: what a pair would need and gain here, before its weights are downloaded."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from . import render
from .pairs import SHIPPED_DRAFT, SHIPPED_TARGET, shipped
from .process import Version

if TYPE_CHECKING:
    from rich.table import Table

    from ..estimate.pair import Asked
    from ..estimate.result import Estimate, Speeds

SHOWN_PASSES = (2, 3, 4, 6, 9, 13, 17)


def estimate(
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--draft-model-name", help="The draft.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "--model-name", help="The target: a directory with config.json, a Hub name."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    q_bits: Annotated[
        int | None, typer.Option("--q-bits", help="As if the target were quantised on load.")
    ] = None,
    draft_q_bits: Annotated[
        int | None, typer.Option("--draft-q-bits", help="As if the draft were.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Length of the prompt to measure behind.")
    ] = 128,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens to generate, for the caches' size.")
    ] = 128,
    turns: Annotated[int, typer.Option("--turns", help="How often to measure everything.")] = 9,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="How long to measure; less is measured in less time."),
    ] = 60.0,
    revision: Annotated[str | None, typer.Option("--revision", help="Of the target.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """Predict what a pair gains on this machine, from the two config.json files alone.

    Weights are random, of the right shapes; only config.json is downloaded.
    """
    if model is None:
        model, draft_model = SHIPPED_TARGET, draft_model or SHIPPED_DRAFT
    if draft_model is None:
        raise OptionError("name the draft model as well, with --draft-model")
    from .. import blas

    blas.load()
    from ..estimate.pair import Effort
    from ..estimate.pair import estimate as measure

    effort = Effort(prompt_tokens, max_tokens, turns, seconds)
    target = _asked(model, dtype, q_bits, revision)
    draft = _asked(draft_model, dtype, draft_q_bits, None)
    with render.progress("measuring") as report:
        found = measure(target, draft, effort, progress=report)
    if as_json:
        text = json.dumps({**found.as_dict(), **_machine()}, ensure_ascii=False) + "\n"
    else:
        text = _pretty(found)
    render.write(sys.stdout, text)


def _asked(name: str, dtype: str, q_bits: int | None, revision: str | None) -> Asked:
    from ..checkpoints.files import read_config
    from ..checkpoints.source import resolve_config
    from ..estimate.pair import Asked

    directory = resolve_config(shipped(name), revision=revision)
    return Asked(name, read_config(directory), dtype, q_bits)


def _machine() -> dict[str, str]:
    from .. import blas
    from ..drafters import device_name

    return {"device": device_name(), "blas": blas.name()}


def _pretty(found: Estimate) -> str:
    """Tables and sentences, as wide as the terminal."""
    from rich.console import Console

    colour = render.wants_colour(sys.stdout)
    console = Console(file=sys.stdout, highlight=False, no_color=not colour)
    with console.capture() as capture:
        console.print(_sides(found))
        console.print(_verdict(found))
        if found.speeds is not None:
            console.print(_costs(found.speeds))
            console.print(_predictions(found.speeds))
        for note in found.notes:
            console.print(f"Note: {note}.", markup=False)
    return capture.get()


def _sides(found: Estimate) -> Table:
    from rich.markup import escape

    from ..checkpoints.disk.sizes import show

    sides = (found.target, found.draft)
    table = _table("", "target", "draft")
    table.add_row("model", *(escape(side.name) for side in sides))
    table.add_row("numbers", *(side.dtype for side in sides))
    table.add_row("weights", *(show(side.weights_bytes) for side in sides))
    text = f"{found.prompt_tokens} + {found.max_tokens} tokens"
    table.add_row(f"caches, {text}", *(show(side.caches_bytes) for side in sides))
    return table


def _verdict(found: Estimate) -> str:
    from ..checkpoints.disk.sizes import show

    need, limit = show(found.memory_bytes), show(found.memory_limit_bytes)
    if found.fits:
        return f"Fits: {need} of the {limit} that models may take here."
    return (
        f"NO: it would not fit. Weights and caches take {need}, and models may take {limit} here. "
        "Smaller models need less, and so do fewer bits (--q-bits, --draft-q-bits)."
    )


def _costs(speeds: Speeds) -> str:
    machine = _machine()
    passes = ", ".join(
        f"{m}: {speeds.passes[m - 1]:.2f}" for m in SHOWN_PASSES if m <= len(speeds.passes)
    )
    text = (
        f"A plain step takes {1000 * speeds.step_seconds:.2f} ms ({1 / speeds.step_seconds:.1f} "
        f"tokens/s); {machine['device']}, BLAS {machine['blas']}.\n"
        f"A draft step costs {speeds.draft_cost:.2f} plain steps, a pass over m tokens\n{passes}."
    )
    if speeds.caution:
        text += f"\n{speeds.caution.capitalize()}."
    if speeds.replays:
        text += "\nThe target cannot take single tokens back: a rejection costs another pass."
    return text


def _predictions(speeds: Speeds) -> Table:
    table = _table(
        "acceptance probability per token", "best number drafted", "speed-up", "tokens/s"
    )
    for one in speeds.predictions:
        length = str(one.num_draft) if one.num_draft else "0 (plain)"
        rate = one.speed_up / speeds.step_seconds
        table.add_row(f"{one.alpha:.0%}", length, f"{one.speed_up:.2f}", f"{rate:.1f}")
    return table


def _table(first: str, *others: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table
