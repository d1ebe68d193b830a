"""The inspect command: show the contents of a checkpoint as tables or one JSON object."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..system import show_size
from . import render
from .flags import REQUIRED, Flags, Json, command, flag
from .loading import REVISION

_PARTS = ("weight", "scales", "biases")
_LAYER = re.compile(r"(?<=[a-z])\.\d+\.")

if TYPE_CHECKING:
    from rich.table import Table

    from ..conversion.inspect import Inspection


class Checkpoint(Flags, panel="Checkpoint"):
    checkpoint: str = flag(
        REQUIRED,
        "The model's directory, a .gguf file, one file of tensors, or a name on the Hub.",
        argument=True,
        metavar="MODEL",
    )
    revision: str | None = flag(None, REVISION)


@command("mlx-specdec inspect weights/t5-enfr")
def inspect(source: Checkpoint, output: Json) -> None:
    """Show what a checkpoint holds, without loading its weights."""
    from ..conversion.inspect import inspect as look

    with render.progress("downloading", in_bytes=True) as report:
        found = look(source.checkpoint, revision=source.revision, progress=report)
    if output.json:
        render.write(sys.stdout, render.as_json(found.as_dict()))
    else:
        _show_inspection(found)


def _show_inspection(found: Inspection) -> None:
    types = render.table("type", ">tensors", ">size")
    for dtype, (count, nbytes) in found.dtypes.items():
        types.add_row(dtype, str(count), show_size(nbytes))
    report = found.tensor_report.describe() if found.tensor_report is not None else ()
    problem = [f"Not convertible: {found.problem}"] if found.problem else []
    sentences = (render.escaped(line) for line in (*report, *problem))
    render.lay_out(sys.stdout, _summary(found), types, _tensors(found), *sentences)


def _summary(found: Inspection) -> Table:
    table = render.table("", "", header=False)
    files = [f"{name} ({show_size(nbytes)})" for name, nbytes in found.files.items()]
    sizes = ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    weights = (
        f"{found.parameters:,}, {show_size(found.nbytes)}, {found.bits_per_weight:.2f} bits each"
    )
    table.add_row("format", found.format)
    table.add_row("model type", render.escaped(found.model_type) or "unknown")
    table.add_row("sizes", sizes or "unknown")
    table.add_row("weights", weights)
    if found.drafter is not None:
        table.add_row("drafts for", _drafts_for(found.drafter))
    table.add_row("quantized", render.escaped(found.quantization) or "no")
    table.add_row("tokenizer", render.escaped(found.tokenizer) or "none")
    table.add_row("files", render.escaped("\n".join(files)))
    return table


def _drafts_for(facts: Mapping[str, Any]) -> str:
    """Describe the target that a drafter needs."""
    layers, width = facts["target_layers"], facts["encoder_hidden_size"]
    if layers is None:
        states = f"the outputs of its {facts['hidden_count']} layers"
    elif layers:
        states = f"the outputs of its layers {', '.join(map(str, layers))}"
    else:
        states = "the input of its head"
    encoder = "" if width is None else f", and its encoder's, of width {width}"
    drafted, vocabulary = facts["draft_vocab_size"], facts["target_vocab_size"]
    tokens = f"{vocabulary}" if drafted == vocabulary else f"{drafted} of {vocabulary}"
    return (
        f"a target of width {facts['target_hidden_size']}, {tokens} tokens; reads {states}{encoder}"
    )


def _tensors(found: Inspection) -> Table:
    """Return a table of tensors. Equal tensors of all layers share one row, and the size of a
    quantized tensor includes its scales and biases."""
    groups: dict[tuple[str, ...], list[int]] = {}
    sizes = {row.name: row.nbytes for row in found.tensors}
    for row in found.tensors:
        path, _, part = row.name.rpartition(".")
        packed = f"{path}.scales" in sizes and part in _PARTS
        if packed and part != "weight":
            continue
        nbytes = sum(sizes.get(f"{path}.{p}", 0) for p in _PARTS) if packed else row.nbytes
        dtype = f"{row.dtype}, quantized" if packed else row.dtype
        shape = " x ".join(map(str, row.shape)) or "scalar"
        becomes = f"-> {row.becomes}" if row.becomes not in ("", row.name) else ""
        parts = [_LAYER.sub(".*.", part, 1) for part in (row.name, becomes, row.note) if part]
        key = ("\n".join(parts), dtype, shape)
        groups.setdefault(key, []).append(nbytes)
    table = render.table("tensor", ">", "type", "shape", ">size")
    for (name, dtype, shape), members in groups.items():
        table.add_row(
            render.escaped(name), str(len(members)), dtype, shape, show_size(sum(members))
        )
    return table
