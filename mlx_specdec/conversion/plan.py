"""What a conversion will write: the plan of one source, and what several kinds of models share."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ..checkpoints.files import Weights
from ..checkpoints.quantization import Quantization, WeightFormat, most_common, quantization_entry
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import TensorChange
from .report import TensorReport


@dataclass(frozen=True)
class Plan:
    """What is to be written for a source: its tensors under final names, and what becomes of each.

    config: config.json of the result, with the source's quantization entry. tensors: starts over at
    each call and gives (name, tensor) as the source holds them, not read yet; what it writes on the
    way, at most scratch_nbytes, goes into the directory that it is given. outlines: name -> a lazy
    array of the type and shape. stored: path of a matrix that the source has quantized -> how.
    quantized: name -> how the conversion quantizes it. natural: name -> the type to write it in
    where the user names none, if not its stored type. keeps_dtype: whether a tensor stays in its
    type whatever the user names. paths: the source's files of weights. notes: sentences for the
    user. extra: tensors for a file that mlx-lm does not read; see `mtp_layers`. not_run: why the
    result cannot be run to see what it computes; "" for models."""

    config: Mapping[str, Any]
    tensors: Callable[[Path], Iterator[tuple[str, Tensor]]]
    outlines: Mapping[str, mx.array]
    report: TensorReport
    format: str
    paths: tuple[Path, ...]
    scratch_nbytes: int = 0
    stored: Mapping[str, Quantization] = field(default_factory=dict)
    quantized: Mapping[str, Quantization] = field(default_factory=dict)
    natural: Mapping[str, mx.Dtype] = field(default_factory=dict)
    keeps_dtype: Callable[[str], bool] = lambda name: False
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    not_run: str = ""

    @classmethod
    def renamed(
        cls, weights: Weights, places: Mapping[str, str], config: Mapping[str, Any], **rest: Any
    ) -> Self:
        """A plan that only renames. places: final name -> the name in `weights`."""

        def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
            for name, place in places.items():
                yield name, weights.tensor(place)

        outlines = {name: weights.tensor(place).outline for name, place in places.items()}
        whole = {"format": weights.format, "paths": weights.paths, **rest}
        return cls(config=config, tensors=tensors, outlines=outlines, **whole)

    @property
    def nbytes(self) -> int:
        return sum(outline.nbytes for outline in self.outlines.values()) + self.extra_nbytes

    @property
    def extra_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.extra.values())

    def parameters(self, name: str) -> int:
        """Count the weights that a tensor stands for; scales stand for none."""
        path, _, part = name.rpartition(".")
        how, size = self.stored.get(path), self.outlines[name].size
        if how is not None and part in how.parts:
            return 0
        return size * 32 // how.bits if how is not None and part == "weight" else size

    @property
    def total_parameters(self) -> int:
        return sum(map(self.parameters, self.outlines))

    def changes(self, dtype: str | None) -> Callable[[str, Tensor], TensorChange]:
        """Return the function that says what becomes of each tensor. dtype: None for as stored."""
        wanted = None if dtype is None else getattr(mx, dtype)

        def change(name: str, tensor: Tensor) -> TensorChange:
            casts = mx.issubdtype(tensor.dtype, mx.floating) and not self.keeps_dtype(name)
            dtype = wanted or self.natural.get(name)
            return TensorChange(dtype if casts else None, self.quantized.get(name))

        return change

    def quantization_entry(self, default: Quantization | None) -> Mapping[str, Any] | None:
        """Return the quantization entry of the result's config.json, None to keep the source's."""
        if default is None:
            return None
        made = {name.removesuffix(".weight"): how for name, how in self.quantized.items()}
        matrices = {**self.stored, **made}
        return quantization_entry(most_common(matrices) if self.stored else default, matrices)


def unsettled(
    numbers: WeightFormat, stored: Mapping[str, Quantization], quantized: Mapping[str, Quantization]
) -> dict[str, Quantization]:
    """Return the matrices that a conversion quantizes, by the name of the weight. Quantized ones of
    the source stay as they are if the source already is what the user asks for. stored: by path.
    quantized: every matrix that can be quantized."""
    keeps = bool(stored) and numbers.fits(stored)
    return {
        name: how
        for name, how in quantized.items()
        if not (keeps and name.removesuffix(".weight") in stored)
    }


def gguf_notes(
    weights: Weights, numbers: WeightFormat, stored: Mapping[str, Quantization]
) -> Iterator[str]:
    """Say what becomes of GGUF's quantized types. stored: as in `Plan`."""
    how, keeps = numbers.quantization, not stored or numbers.fits(stored)
    expanded = [*weights.expanded, *([] if keeps else weights.exact)]
    names = ", ".join(expanded)
    if names and how is not None:
        yield (
            f"quantized {names} again, to {how.bits} bits: rounding a second time costs accuracy; "
            "more --q-bits cost less, and without --quantize nothing is lost"
        )
    elif names:
        halves = "" if numbers.dtype else "--dtype float16 halves the result, "
        yield (
            f"expanded {names} to {numbers.dtype or 'float32'}: {halves}--quantize makes it small "
            "again, and rounds a second time"
        )
    if keeps and weights.exact:
        yield f"kept {', '.join(weights.exact)} bit for bit, in MLX's groups of 32"


_LAYER = re.compile(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", re.DOTALL)


def summary_of(names: Iterable[str]) -> str:
    """Tensors in words, those of several layers as one: "model.layers.{0,1}.mlp.gate.weight"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = _LAYER.fullmatch(name).groups("")  # type: ignore[union-attr]
        groups.setdefault((before, after), []).append(number)
    return ", ".join(
        f"{before}{numbers[0] if len(numbers) == 1 else '{' + ','.join(numbers) + '}'}{after}"
        for (before, after), numbers in groups.items()
    )
