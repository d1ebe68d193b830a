"""The convert command."""

from pathlib import Path
from typing import Literal

from ..errors import OptionError
from . import interrupts, render
from .flags import REQUIRED, Flags, command, flag
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
