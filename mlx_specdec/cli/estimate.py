"""The estimate command: what a pair would need and gain here, before it is downloaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import OptionError
from . import render
from .flags import Flags, command, flag
from .groups import MAX_TOKENS, Json, Sources
from .pairs import named, shipped

if TYPE_CHECKING:
    from rich.table import Table

    from ..estimate.pair import Asked
    from ..estimate.result import Estimate, Speeds

SHOWN_PASSES = (2, 3, 4, 6, 9, 13, 17)


@dataclass(frozen=True)
class EffortFlags(Flags):
    """How much is measured."""

    panel = "Measuring"
    prompt_tokens: int = flag(128, "The number of tokens of the prompt.")
    max_tokens: int = flag(128, MAX_TOKENS, "-m")
    turns: int = flag(9, "The number of times that everything is measured.")
    seconds: float = flag(60.0, "The time in seconds that measuring may take.")


@command("mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --q-bits 4")
def estimate(sources: Sources, effort: EffortFlags, output: Json) -> None:
    """Predict what a pair gains, before it is downloaded.

    Only the two config.json files are needed: the weights are random and have the right shapes.
    """
    model, draft_model = named(sources)
    if draft_model is None:
        raise OptionError("name the draft model as well, with --draft-model")
    from .. import blas

    blas.load()
    from ..estimate.pair import Effort
    from ..estimate.pair import estimate as measure

    target = _asked(model, sources.dtype, sources.q_bits, sources.revision)
    draft = _asked(draft_model, sources.dtype, sources.draft_q_bits, None)
    asked = Effort(effort.prompt_tokens, effort.max_tokens, effort.turns, effort.seconds)
    with render.progress("measuring") as report:
        found = measure(target, draft, asked, progress=report)
    told = render.as_json({**found.as_dict(), **_machine()}) if output.json else _pretty(found)
    render.write(sys.stdout, told)


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
    """Tables and sentences."""
    speeds = found.speeds
    measured = () if speeds is None else (_costs(speeds), _predictions(speeds))
    notes = (f"Note: {note}." for note in found.notes)
    return render.laid_out(sys.stdout, _sides(found), _verdict(found), *measured, *notes)


def _sides(found: Estimate) -> Table:
    from ..checkpoints.disk.sizes import show

    sides = (found.target, found.draft)
    table = render.table("", ">target", ">draft")
    table.add_row("model", *(side.name for side in sides))
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
    table = render.table(
        "acceptance probability of a draft token", ">best draft length", ">speedup", ">tokens/s"
    )
    for one in speeds.predictions:
        length = str(one.num_draft) if one.num_draft else "0 (plain)"
        rate = one.speed_up / speeds.step_seconds
        table.add_row(f"{one.alpha:.0%}", length, f"{one.speed_up:.2f}", f"{rate:.1f}")
    return table
