"""The plan of a conversion, and helpers for the plans of several kinds of models."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..checkpoints.files import Weights
from ..checkpoints.quantization import Quantization, WeightFormat, most_common, quantization_entry
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

    def quantization_entry(self, default: Quantization | None) -> Mapping[str, Any] | None:
        """Return the quantization entry of the result's config.json, None to keep the source's."""
        if default is None:
            return None
        made = {name.removesuffix(".weight"): how for name, how in self.quantized.items()}
        matrices = {**self.stored, **made}
        return quantization_entry(most_common(matrices) if self.stored else default, matrices)


def unsettled(
    weight_format: WeightFormat,
    stored: Mapping[str, Quantization],
    quantized: Mapping[str, Quantization],
) -> dict[str, Quantization]:
    """Return the entries of `quantized`, all matrices that can be quantized, that a conversion has
    to quantize. Matrices in `stored` are quantized in the source already, and stay unchanged if
    they have the requested format."""
    keeps = bool(stored) and weight_format.fits(stored)
    return {
        name: how
        for name, how in quantized.items()
        if not (keeps and name.removesuffix(".weight") in stored)
    }


def gguf_notes(
    weights: Weights, weight_format: WeightFormat, stored: Mapping[str, Quantization]
) -> Iterator[str]:
    """Yield sentences about GGUF's quantized types. stored: See `Plan`."""
    how, keeps = weight_format.quantization, not stored or weight_format.fits(stored)
    expanded = [*weights.expanded, *([] if keeps else weights.exact)]
    names = ", ".join(expanded)
    if names and how is not None:
        yield (
            f"quantized {names} again, to {how.bits} bits: rounding a second time costs accuracy; "
            "more --q-bits cost less, and without --quantize nothing is lost"
        )
    elif names:
        halves = "" if weight_format.dtype else "--dtype float16 halves the result, "
        yield (
            f"expanded {names} to {weight_format.dtype or 'float32'}: {halves}--quantize makes it "
            "small again, and rounds a second time"
        )
    if keeps and weights.exact:
        yield f"kept {', '.join(weights.exact)} bit for bit, in MLX's groups of 32"


_NAME_PARTS = re.compile(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", re.DOTALL)


def summary_of(names: Iterable[str]) -> str:
    """List tensors, with layers in one entry: "model.layers.{0,1}.mlp.gate.weight"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = _NAME_PARTS.fullmatch(name).groups("")  # type: ignore[union-attr]
        groups.setdefault((before, after), []).append(number)
    return ", ".join(
        f"{before}{layers[0] if len(layers) == 1 else '{' + ','.join(layers) + '}'}{after}"
        for (before, after), layers in groups.items()
    )
