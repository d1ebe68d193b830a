"""The convert command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import render
from .process import Version


def convert(
    model: Annotated[
        str,
        typer.Option("--model", "--model-name", help="A directory, a .gguf file or a Hub name."),
    ],
    mlx_path: Annotated[
        Path | None, typer.Option("--mlx-path", help="Where to write; weights/NAME by default.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option("--dtype", help="As stored where not given."),
    ] = None,
    quantize: Annotated[bool, typer.Option("--quantize", "-q", help="Quantize.")] = False,
    q_bits: Annotated[
        int | None, typer.Option("--q-bits", help="Bits of a quantized weight; 4 by default.")
    ] = None,
    q_group_size: Annotated[
        int | None,
        typer.Option("--q-group-size", help="Weights that share one scale; 64 by default."),
    ] = None,
    q_mode: Annotated[
        Literal["affine", "mxfp4", "nvfp4", "mxfp8"],
        typer.Option("--q-mode", help="MLX's number format of quantized weights."),
    ] = "affine",
    quant_predicate: Annotated[
        Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"] | None,
        typer.Option("--quant-predicate", help="One of mlx-lm's predicates of mixed widths."),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", "-d", help="Dequantize a quantized source.")
    ] = False,
    upload_repo: Annotated[
        str | None, typer.Option("--upload-repo", help="USER/NAME on the Hub to upload to.")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size", help="Of one file written, for example 500MB; 4GB by default."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a Hub name.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what lies at the destination.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Run source and result and compare them, on a fixed text as well."
        ),
    ] = False,
    version: Version = False,
) -> None:
    """Turn a T5 or Llama-family checkpoint into MLX weights, and check them."""
    from .. import blas

    blas.load()

    from ..checkpoints.convert import convert as run
    from ..checkpoints.disk import sizes
    from ..compare_models import compare_logits, compare_text

    shard_bytes = None if max_shard_size is None else sizes.parse(max_shard_size)
    with render.progress("converting", in_bytes=True) as report:
        done = run(
            model,
            mlx_path,
            dtype=dtype,
            quantize=quantize,
            q_bits=q_bits,
            q_group_size=q_group_size,
            q_mode=q_mode,
            quant_predicate=quant_predicate,
            dequantize=dequantize,
            upload_repo=upload_repo,
            revision=revision,
            overwrite=overwrite,
            shard_bytes=shard_bytes,
            verify=verify,
            compare_logits=compare_logits,
            compare_text=compare_text,
            announce=render.tell,
            progress=report,
        )
    render.tell(render.converted(done))
