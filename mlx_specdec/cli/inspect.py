"""The inspect command: show the contents of a checkpoint as tables or one JSON object."""

import sys
from collections.abc import Mapping
from typing import Any

from ..system import show_size
from . import render
from .flags import REQUIRED, Flags, Json, command, flag
from .loading import REVISION


class Checkpoint(Flags, panel="Checkpoint"):
    checkpoint: str = flag(
        "The model's directory, a .gguf file, one file of tensors, or a name on the Hub.",
        REQUIRED,
        argument=True,
        metavar="MODEL",
    )
    revision: str | None = flag(REVISION)


@command("mlx-specdec inspect weights/t5-enfr")
def inspect(source: Checkpoint, output: Json) -> None:
    """Show what a checkpoint holds, without loading its weights."""
    from ..conversion.inspect import grouped
    from ..conversion.inspect import inspect as look

    with render.progress("downloading", in_bytes=True) as report:
        facts, lines = look(source.checkpoint, revision=source.revision, progress=report)
    if output.json:
        render.write(sys.stdout, render.as_json(facts))
        return
    files = [f"{name} ({show_size(nbytes)})" for name, nbytes in facts["files"].items()]
    sizes = ", ".join(f"{name} {size}" for name, size in facts["sizes"].items())
    bits = f"{facts['bits_per_weight']:.2f} bits each"
    summary = render.table("", "", header=False)
    summary.add_row("format", facts["format"])
    summary.add_row("model type", render.escaped(facts["model_type"] or "unknown"))
    summary.add_row("sizes", sizes or "unknown")
    summary.add_row("weights", f"{facts['parameters']:,}, {show_size(facts['bytes'])}, {bits}")
    if facts["drafter"] is not None:
        summary.add_row("drafts for", _drafts_for(facts["drafter"]))
    summary.add_row("quantized", render.escaped(facts["quantization"] or "no"))
    summary.add_row("tokenizer", render.escaped(facts["tokenizer"] or "none"))
    summary.add_row("files", render.escaped("\n".join(files)))
    types = render.table("type", ">tensors", ">size")
    for dtype, entry in facts["dtypes"].items():
        types.add_row(dtype, str(entry["tensors"]), show_size(entry["bytes"]))
    problem = [f"Not convertible: {facts['problem']}"] if facts["problem"] else []
    sentences = (render.escaped(line) for line in (*lines, *problem))
    tensors = render.table("tensor", ">", "type", "shape", ">size")
    for (name, dtype, shape), members in grouped(facts["tensors"]).items():
        size = show_size(sum(members))
        tensors.add_row(render.escaped(name), str(len(members)), dtype, shape, size)
    render.lay_out(sys.stdout, summary, types, tensors, *sentences)


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
