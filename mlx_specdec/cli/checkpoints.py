"""The commands that convert a checkpoint, show what one holds, and list or remove those on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.stored_models import (
    OTHER_PROGRAMS,
    SHIPPED,
    hub_cache,
    names,
    remove,
    stored_models,
)
from ..errors import CheckpointError, OptionError
from ..system import show_size
from . import interrupts, render
from .flags import REQUIRED, Flags, Json, command, flag
from .loading import REVISION


class Conversion(Flags, panel="Conversion"):
    """Flags for the source and the result. `conversion.convert.convert` has parameters
    of the same names."""

    model: str = flag(
        "The source: a directory, a .gguf file or a name on the Hugging Face Hub.",
        REQUIRED,
        "--model-name",
        "--hf-path",
    )
    mlx_path: Path | None = flag("The directory to write to.", show_default="weights/NAME")
    revision: str | None = flag(REVISION)
    overwrite: bool = flag("Replace a model that lies at the destination.")


class NumberFlags(Flags, panel="Number format"):
    dtype: Literal["float32", "float16", "bfloat16"] | None = flag(
        "The type of weights that are not quantized.", show_default="as stored"
    )
    quantize: bool = flag("Quantize the weights.", None, "-q")
    q_bits: int | None = flag("The bits of a quantized weight.", show_default="4")
    q_group_size: int | None = flag(
        "The number of weights that share one scale.", show_default="64"
    )
    q_mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] = flag(
        "The format of quantized weights in MLX.", "affine"
    )
    quant_predicate: Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"] | None = flag(
        "One of the mixtures of bits that mlx-lm defines."
    )
    dequantize: bool = flag("Dequantize a quantized source.", None, "-d")

    def quantization(self) -> int | str | None:
        """Return the argument `quantize` of `conversion.convert.convert`. Raises OptionError if
        flags contradict each other."""
        mode = None if self.q_mode == "affine" else self.q_mode
        sizes = {
            "--q-bits": self.q_bits,
            "--q-mode": mode,
            "--quant-predicate": self.quant_predicate,
        }
        named = [flag for flag, value in sizes.items() if value is not None]
        if self.quantize and self.dequantize:
            raise OptionError("choose either --quantize or --dequantize, not both")
        if named and not self.quantize:
            raise OptionError(f"{named[0]} says how to quantize: add --quantize")
        if len(named) > 1:
            raise OptionError(f"{named[1]} says the bits itself: leave {named[0]} out")
        if not self.quantize:
            return "none" if self.dequantize else None
        return self.quant_predicate or mode or self.q_bits or self.q_mode


@command("mlx-specdec convert --model t5-small --quantize --q-bits 8")
def convert(conversion: Conversion, numbers: NumberFlags) -> None:
    """Turn a checkpoint into MLX weights, and check them."""
    from ..conversion.convert import convert as run

    quantize = numbers.quantization()
    interrupts.at_end(
        lambda: (
            "interrupted: nothing was written; the same command goes on with a download, and "
            "repeats the conversion"
        )
    )
    with render.progress("converting", in_bytes=True) as report:
        done = run(
            **vars(conversion),
            dtype=numbers.dtype,
            quantize=quantize,
            q_group_size=numbers.q_group_size,
            progress=lambda step, done, total: report(done, total, step),
        )
    render.tell(done.describe())


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


class ModelsFlags(Flags, panel="Models"):
    action: Literal["list", "remove"] = flag(
        "List the models, or remove one.", "list", argument=True, metavar="[remove]"
    )
    name: str | None = flag(
        "The name of the model to remove.", argument=True, metavar="[NAME]", autocompletion=names
    )


@command("mlx-specdec models", "mlx-specdec models remove mlx-community/Qwen3-8B-4bit")
def models(flags: ModelsFlags) -> None:
    """List the models on this disk, or remove one.

    The list has the models of the Hub's cache, of LM Studio, of ollama and of weights/, and the
    downloads of scripts/real_models.sh. Only models of the Hub's cache and
    of the script can be removed. You are asked first."""
    if flags.action == "remove":
        _remove(flags.name)
        return
    if flags.name is not None:
        raise OptionError(
            "to list models takes no name: mlx-specdec models remove NAME removes one"
        )
    from ..models.drafters import kinds, medusa
    from ..models.loading import why_not

    found = stored_models()
    table = render.table("model", ">size", "type", "last used", "runs here")
    for one in found:
        used = time.strftime("%Y-%m-%d", time.localtime(one.used)) if one.used else ""
        kind = ""
        with suppress(CheckpointError):  # loading reports what is damaged
            if medusa.is_medusa(one.directory):
                kind = "Medusa heads"
            elif drafter := kinds.kind_of(one.directory):
                kind = f"{drafter} drafter"
        problem = one.problem or ("" if kind else why_not(one.directory))
        cells = [one.name, show_size(one.nbytes), kind or one.type, used, problem or "yes"]
        table.add_row(*map(render.escaped, cells))
    total = sum(one.nbytes for one in found if one.in_hub)
    if found:
        render.lay_out(sys.stdout, table, wrap=False)
    render.lay_out(
        sys.stdout,
        f"The Hub's cache {hub_cache()} has {show_size(total)} of models. mlx-specdec models "
        "remove NAME removes one.",
    )


def _remove(name: str | None) -> None:
    if name is None:
        raise OptionError("name the model to remove: mlx-specdec models lists all of them")
    if name.startswith(SHIPPED):
        raise OptionError(f"{name} came with the program: remove its directory yourself")
    if name.startswith(OTHER_PROGRAMS):
        raise OptionError(f"{name} belongs to another program: remove it there")
    size = next((show_size(one.nbytes) for one in stored_models() if one.name == name), "")
    if size:
        print(f"Remove {name} ({size}) from the disk? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            render.tell("nothing was removed")
            return
    render.tell(f"removed {name}: {show_size(remove(name))} are free")
