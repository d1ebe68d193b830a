"""The commands that measure what rounds of a pair cost: before it is downloaded, and after."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import process
from ..checkpoints.disk import show
from ..errors import OptionError
from ..options import mtp_of, own_layers
from . import render
from .flags import MAX_TOKENS, Flags, Json, command, flag, group
from .loading import Sources, named

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.prediction import BestLength, Cluster, Estimate, Speeds

SHOWN_PASSES = (2, 3, 4, 6, 9, 13, 17)
COLUMNS = ("acceptance probability of a draft token", ">best draft length", ">speedup", ">tokens/s")
NEEDS_LINK = (
    "say with --link-us how many microseconds a sum over the machines takes: about 100 over RDMA, "
    "300 over a Thunderbolt bridge, 600 over Ethernet, 5000 over Wi-Fi; scripts/measure_all_sum.py "
    "measures it"
)


@group("Measuring")
class EffortFlags(Flags):
    prompt_tokens: int = flag(128, "The number of tokens of the prompt.", min=1)
    max_tokens: int = flag(128, MAX_TOKENS, "-m", min=1)
    turns: int = flag(9, "The number of times that everything is measured.", min=1)
    seconds: float = flag(60.0, "The time in seconds that measuring may take.")


@group("More than one machine")
class ClusterFlags(Flags):
    distributed: int | None = flag(
        None, "The number of machines such as this one that are to share the target.", min=2
    )
    link_us: float | None = flag(
        None, "The time in microseconds that a sum over the machines takes.", min=0
    )
    pipeline: bool = flag(False, "Give each machine some of the layers, not a part of all.")


@command(
    "mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model auto --q-bits 4",
    "mlx-specdec estimate --model A --draft-model B --distributed 2 --link-us 100",
)
def estimate(sources: Sources, effort: EffortFlags, machines: ClusterFlags, output: Json) -> None:
    """Predict what a pair gains, before it is downloaded.

    Only the two config.json files are needed: the weights are random and have the right shapes."""
    if machines.distributed is None and (machines.link_us is not None or machines.pipeline):
        raise OptionError("say with --distributed how many machines share the target")
    if machines.distributed is not None and machines.link_us is None:
        raise OptionError(NEEDS_LINK)
    model, draft_model = named(sources)
    if draft_model is None:
        raise OptionError("name the draft model as well, with --draft-model")
    if mtp_of(draft_model) is not None:
        raise OptionError(
            "estimate needs the files of layers for multi-token prediction: give their directory"
        )
    from ..checkpoints.source import resolve_config
    from ..measure.estimate import DrafterSource, ModelSource, model_source, own_draft
    from ..measure.estimate import estimate as measure
    from ..measure.prediction import Link
    from ..models.drafters.kinds import outline

    expand = sources.expand_weights
    target = model_source(model, sources.revision, sources.dtype, sources.q_bits, expand)
    draft: ModelSource | DrafterSource
    if own_layers(draft_model) is not None:
        draft = own_draft(target, draft_model, sources.draft_q_bits)
    else:
        numbers = sources.dtype, sources.draft_q_bits, expand
        if files := outline(resolve_config(draft_model)):
            draft = DrafterSource(draft_model, files, *numbers)
        else:
            draft = model_source(draft_model, None, *numbers)
    link = None
    if machines.distributed is not None and machines.link_us is not None:
        link = Link(machines.distributed, 1e-6 * machines.link_us, machines.pipeline)

    def announce(estimate: Estimate) -> None:
        if not output.json:
            render.lay_out(sys.stdout, _sides(estimate), _verdict(estimate))

    with render.progress("measuring") as report:
        how = vars(effort)
        found = measure(target, draft, **how, link=link, announce=announce, progress=report)
    machine = {"device": process.device_name(), "blas": process.name()}
    if output.json:
        render.write(sys.stdout, render.as_json({**found.as_dict(), **machine}))
        return
    measured: tuple[Table | str, ...] = ()
    if (speeds := found.speeds) is not None:
        predictions = render.table(*COLUMNS)
        for one in speeds.predictions:
            predictions.add_row(*_cells(one, speeds.step_seconds))
        measured = (_costs(speeds, machine), predictions, *_on_cluster(found.cluster, speeds))
    notes = (f"Note: {note}." for note in found.notes)
    render.lay_out(sys.stdout, *measured, *notes)


def _sides(found: Estimate) -> Table:
    sides = (found.target, found.draft)
    kind = "draft" if found.proposer == "draft" else f"draft, {found.proposer}"
    table = render.table("", ">target", f">{kind}")
    table.add_row("model", *(side.name for side in sides))
    table.add_row("numbers", *(side.dtype for side in sides))
    table.add_row("weights", *(show(side.weights_bytes) for side in sides))
    text = f"{found.prompt_tokens} + {found.max_tokens} tokens"
    table.add_row(f"caches, {text}", *(show(side.caches_bytes) for side in sides))
    return table


def _verdict(found: Estimate) -> str:
    need, limit = show(found.memory_bytes), show(found.memory_limit_bytes)
    if found.fits:
        share = f"on each of {found.cluster.machines} machines, " if found.cluster else ""
        return f"Fits: {share}{need} of the {limit} that models may take here."
    return (
        f"NO: it would not fit. Weights and caches take {need}, and models may take {limit} here. "
        "Smaller models need less, and so do fewer bits (--q-bits, --draft-q-bits)."
    )


def _costs(speeds: Speeds, machine: Mapping[str, str]) -> str:
    passes = ", ".join(
        f"{m}: {speeds.passes[m - 1]:.2f}" for m in SHOWN_PASSES if m <= len(speeds.passes)
    )
    return (
        f"A plain step takes {1000 * speeds.step_seconds:.2f} ms ({1 / speeds.step_seconds:.1f} "
        f"tokens/s); {machine['device']}, BLAS {machine['blas']}.\n"
        f"A draft step costs {speeds.draft_cost:.2f} plain steps, every round {speeds.start:.2f} "
        f"besides, a pass over m tokens\n{passes}."
    )


def _cells(one: BestLength, step_seconds: float) -> tuple[str, ...]:
    length = str(one.num_draft) if one.num_draft else "0 (plain)"
    rate = one.speed_up / step_seconds
    return f"{one.alpha:.0%}", length, f"{one.speed_up:.2f}", f"{rate:.1f}"


def _on_cluster(cluster: Cluster | None, speeds: Speeds) -> Sequence[Table | str]:
    if cluster is None or cluster.speeds is None:
        return ()
    step = cluster.speeds.step_seconds
    local = 1000 * cluster.share * speeds.step_seconds
    text = (
        f"On {cluster.machines} machines ({cluster.mode}) a plain step takes {1000 * step:.2f} ms "
        f"({1 / step:.1f} tokens/s): {local:.2f} ms, and {cluster.exchanges} exchanges of "
        f"{cluster.link_us:g} us.\n"
        "They are plainly faster than one of them while an exchange takes less than "
        f"{cluster.speeds.pays_below_us:.0f} us, and with\n"
        "drafts below the last column but one; above the last one, drafts gain more than on one."
    )
    table = render.table(*COLUMNS, ">pays below, us", ">gains more above, us")
    for one in cluster.speeds.predictions:
        even = "-" if one.break_even_us is None else f"{one.break_even_us:.0f}"
        table.add_row(*_cells(one, step), f"{one.pays_below_us:.0f}", even)
    return text, table
