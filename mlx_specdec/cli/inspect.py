"""The inspect command: what a checkpoint holds, as tables or one JSON object."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import render
from .process import Version

_PARTS = ("weight", "scales", "biases")
LONGEST_LINE = 10_000
"""Where nobody looks at it, but a program reads it."""
_LAYER = re.compile(r"(?<=[a-z])\.\d+\.")

if TYPE_CHECKING:
    from rich.table import Table

    from ..checkpoints.inspect import Inspection


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_FILE",
            help="A model's directory, a .gguf or llama2.c file, or one file of tensors.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """Show what a checkpoint of any supported format holds, without loading its weights."""
    from .. import blas

    blas.load()
    from ..checkpoints.inspect import inspect as look

    found = look(checkpoint)
    text = json.dumps(found.as_dict(), ensure_ascii=False) + "\n" if as_json else _pretty(found)
    render.write(sys.stdout, text)


def _pretty(found: Inspection) -> str:
    from rich.console import Console

    colour = render.wants_colour(sys.stdout)
    # A name that is cut in two lines is one that grep does not find.
    width = None if sys.stdout.isatty() else LONGEST_LINE
    console = Console(file=sys.stdout, highlight=False, no_color=not colour, width=width)
    with console.capture() as capture:
        console.print(_summary(found))
        console.print(_types(found))
        console.print(_tensors(found))
        for line in found.tensor_report.describe() if found.tensor_report is not None else ():
            console.print(_safe(line))
        if found.problem:
            console.print(_safe(f"Not convertible: {found.problem}"))
    return capture.get()


def _summary(found: Inspection) -> Table:
    from ..checkpoints.disk.sizes import show

    table = _table("", ("", "left"))
    files = [f"{name} ({show(nbytes)})" for name, nbytes in found.files.items()]
    sizes = ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    weights = f"{found.parameters:,}, {show(found.nbytes)}, {found.bits_per_weight:.2f} bits each"
    table.add_row("format", found.format)
    table.add_row("model type", _safe(found.model_type) or "unknown")
    table.add_row("sizes", sizes or "unknown")
    table.add_row("weights", weights)
    table.add_row("quantized", _safe(found.quantization) or "no")
    table.add_row("tokenizer", _safe(found.tokenizer) or "none")
    table.add_row("files", _safe("\n".join(files)))
    return table


def _types(found: Inspection) -> Table:
    from ..checkpoints.disk.sizes import show

    table = _table("type", ("tensors", "right"), ("size", "right"))
    for dtype, (count, nbytes) in found.dtypes.items():
        table.add_row(dtype, str(count), show(nbytes))
    return table


def _tensors(found: Inspection) -> Table:
    """One line for what is the same in all layers; scales and biases go with their matrix."""
    from ..checkpoints.disk.sizes import show

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
    table = _table("tensor", ("", "right"), ("type", "left"), ("shape", "left"), ("size", "right"))
    for (name, dtype, shape), each in groups.items():
        table.add_row(_safe(name), str(len(each)), dtype, shape, show(sum(each)))
    return table


def _safe(text: str) -> str:
    """Words of a checkpoint are nobody's commands, to the terminal or to rich."""
    from rich.markup import escape

    return escape(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )


def _table(first: str, *others: tuple[str, str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_header=bool(first))
    table.add_column(first, overflow="fold")
    for name, side in others:
        justify = "right" if side == "right" else "left"
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table
