"""The plan of a conversion, and helpers for the plans of several kinds of models."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..checkpoints.files import Weights
from ..checkpoints.formats.gguf_blocks import TYPES
from ..checkpoints.quantization import Quantization, WeightFormat
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import ResultTensor
from .report import TensorReport


@dataclass(frozen=True)
class Plan:
    """The tensors to write for a source, and how each of them is changed.

    Attributes:
        weights: The source's weights.
        config: config.json of the result, with the source's quantization entry.
        tensors: Final name -> tensor of the source, not read yet.
        stored: Path of a matrix that is quantized in the source -> its quantization.
        quantized: Final name of a matrix -> how the conversion quantizes it.
        natural: Final name -> the dtype if the user names none, for tensors whose stored dtype is
            not suitable.
        keeps_dtype: Whether a tensor keeps its dtype even if the user names another.
        notes: Sentences for the user.
        extra: Tensors for a file that mlx-lm does not read; see `mtp_layers`.
        not_run: Why the result cannot be run to verify it; "" if it can.
    """

    weights: Weights
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    report: TensorReport
    stored: Mapping[str, Quantization] = field(default_factory=dict)
    quantized: Mapping[str, Quantization] = field(default_factory=dict)
    natural: Mapping[str, mx.Dtype] = field(default_factory=dict)
    keeps_dtype: Callable[[str], bool] = lambda name: False
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    not_run: str = ""

    def parameters(self, name: str) -> int:
        """Count the weights in a tensor, which are packed if it is quantized. Scales are none."""
        path, _, part = name.rpartition(".")
        how, size = self.stored.get(path), self.tensors[name].size
        if how is not None and part in how.parts:
            return 0
        return size * 32 // how.bits if how is not None and part == "weight" else size

    @property
    def total_parameters(self) -> int:
        return sum(map(self.parameters, self.tensors))

    def outputs(self, dtype: str | None) -> list[ResultTensor]:
        """Return what a conversion writes. dtype: None keeps the stored one."""

        def output(name: str, tensor: Tensor) -> ResultTensor:
            casts = mx.issubdtype(tensor.dtype, mx.floating) and not self.keeps_dtype(name)
            wanted = self.natural.get(name) if dtype is None else getattr(mx, dtype)
            how = self.quantized.get(name)
            return ResultTensor(name, tensor, self.parameters(name), wanted if casts else None, how)

        return [output(name, tensor) for name, tensor in self.tensors.items()]


def gguf_notes(weights: Weights, weight_format: WeightFormat) -> Iterator[str]:
    """Yield sentences about GGUF's quantized types that a conversion keeps."""
    if weight_format.dequantize:
        return
    stored = {weights.stored[place].dtype for place in weights.origins.values()}
    kept = {name: how.bits for name, how in TYPES.items() if name in stored}
    exact = [name for name in kept if not name.endswith("_K")]
    rounded = [f"{name} at {bits} bits" for name, bits in kept.items() if name not in exact]
    if exact:
        yield f"kept {', '.join(exact)} bit for bit, in MLX's groups of 32"
    if rounded:
        yield (
            f"kept {', '.join(rounded)} in groups of 32: their scales are rounded to float16, "
            "by at most 0.05 %"
        )
