"""The inspect command: what a checkpoint holds, as tables or one JSON object."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoints.disk.sizes import show
from . import render
from .flags import REQUIRED, Flags, command, flag
from .groups import REVISION, Json

_PARTS = ("weight", "scales", "biases")
_LAYER = re.compile(r"(?<=[a-z])\.\d+\.")

if TYPE_CHECKING:
    from rich.table import Table

    from ..checkpoints.inspect import Inspection


@dataclass(frozen=True)
class Checkpoint(Flags):
    """What is looked at."""

    panel = "Checkpoint"
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
    from .. import blas

    blas.load()
    from ..checkpoints.inspect import inspect as look

    with render.progress("downloading", in_bytes=True) as report:
        told = look(source.checkpoint, revision=source.revision, progress=report)
    text = render.as_json(told.as_dict()) if output.json else _pretty(told)
    render.write(sys.stdout, text)


def _pretty(told: Inspection) -> str:
    report = told.tensor_report.describe() if told.tensor_report is not None else ()
    problem = [f"Not convertible: {told.problem}"] if told.problem else []
    said = (render.escaped(line) for line in (*report, *problem))
    return render.laid_out(sys.stdout, _summary(told), _types(told), _tensors(told), *said)


def _summary(told: Inspection) -> Table:
    table = render.table("", "", header=False)
    files = [f"{name} ({show(nbytes)})" for name, nbytes in told.files.items()]
    sizes = ", ".join(f"{name} {size}" for name, size in told.sizes.items())
    weights = f"{told.parameters:,}, {show(told.nbytes)}, {told.bits_per_weight:.2f} bits each"
    table.add_row("format", told.format)
    table.add_row("model type", render.escaped(told.model_type) or "unknown")
    table.add_row("sizes", sizes or "unknown")
    table.add_row("weights", weights)
    table.add_row("quantized", render.escaped(told.quantization) or "no")
    table.add_row("tokenizer", render.escaped(told.tokenizer) or "none")
    table.add_row("files", render.escaped("\n".join(files)))
    return table


def _types(told: Inspection) -> Table:
    table = render.table("type", ">tensors", ">size")
    for dtype, (count, nbytes) in told.dtypes.items():
        table.add_row(dtype, str(count), show(nbytes))
    return table


def _tensors(told: Inspection) -> Table:
    """One line for what is the same in all layers; scales and biases go with their matrix."""
    groups: dict[tuple[str, ...], list[int]] = {}
    sizes = {row.name: row.nbytes for row in told.tensors}
    for row in told.tensors:
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
    for (name, dtype, shape), each in groups.items():
        table.add_row(render.escaped(name), str(len(each)), dtype, shape, show(sum(each)))
    return table
