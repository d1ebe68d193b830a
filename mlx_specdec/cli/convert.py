"""The convert command."""

from pathlib import Path
from typing import Literal

from . import interrupts, render
from .flags import REQUIRED, Flags, command, flag, group
from .loading import REVISION


@group("Conversion")
class Conversion(Flags):
    """Flags for the source and the result. Their names are also parameters of
    `conversion.convert.convert`."""

    model: str = flag(
        REQUIRED,
        "The source: a directory, a .gguf file or a name on the Hugging Face Hub.",
        "--model-name",
        "--hf-path",
    )
    mlx_path: Path | None = flag(None, "The directory to write to.", show_default="weights/NAME")
    revision: str | None = flag(None, REVISION)
    overwrite: bool = flag(False, "Replace a model that lies at the destination.")
    upload_repo: str | None = flag(
        None, "The repository on the Hub to upload to.", metavar="USER/NAME"
    )


@group("Number format")
class NumberFlags(Flags):
    dtype: Literal["float32", "float16", "bfloat16"] | None = flag(
        None, "The type of weights that are not quantized.", show_default="as stored"
    )
    quantize: bool = flag(False, "Quantize the weights.", "-q")
    q_bits: int | None = flag(None, "The bits of a quantized weight.", show_default="4")
    q_group_size: int | None = flag(
        None, "The number of weights that share one scale.", show_default="64"
    )
    q_mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] = flag(
        "affine", "The format of quantized weights in MLX."
    )
    quant_predicate: Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"] | None = flag(
        None, "One of the mixtures of bits that mlx-lm defines."
    )
    dequantize: bool = flag(False, "Dequantize a quantized source.", "-d")


@command("mlx-specdec convert --model t5-small --quantize --q-bits 8")
def convert(conversion: Conversion, numbers: NumberFlags) -> None:
    """Turn a checkpoint into MLX weights, and check them."""
    from ..conversion.convert import convert as run
    from ..conversion.verify import compare_logits, compare_text

    settings = {**vars(conversion), **vars(numbers)}
    model, destination = settings.pop("model"), settings.pop("mlx_path")
    interrupts.at_end(
        lambda: (
            "interrupted: nothing was written; the same command goes on with a download, and "
            "begins a conversion anew"
        )
    )
    with (
        render.progress("downloading", in_bytes=True) as report_download,
        render.progress("converting", in_bytes=True) as report,
    ):
        done = run(
            model,
            destination,
            compare_logits=compare_logits,
            compare_text=compare_text,
            announce=render.tell,
            working=render.slowly,
            progress=report,
            download_progress=report_download,
            **settings,
        )
    render.tell(done.describe())
