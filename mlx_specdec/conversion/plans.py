"""What a conversion will write, worked out before anything is read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints.disk import read_json
from ..checkpoints.files import Weights
from ..checkpoints.quantization import (
    PARTS,
    Numbers,
    Quantization,
    most_common,
    quantization_entry,
)
from ..checkpoints.tensors import DTYPES, Tensor, same
from ..checkpoints.writer import Change
from ..errors import CheckpointError, OptionError
from ..models import families
from ..models.drafters import kinds
from ..models.drafters.files import IN_16_BITS, DrafterFiles
from ..models.encoder_decoder.family import EncoderDecoderFamily
from .report import TensorReport, report_tensors


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

    def changes(self, dtype: str | None) -> Callable[[str, Tensor], Change]:
        """Return the function that says what becomes of each tensor. dtype: None for as stored."""
        wanted = None if dtype is None else getattr(mx, dtype)

        def change(name: str, tensor: Tensor) -> Change:
            casts = mx.issubdtype(tensor.dtype, mx.floating) and not self.keeps_dtype(name)
            dtype = wanted or self.natural.get(name)
            return Change(dtype if casts else None, self.quantized.get(name))

        return change

    def quantization_entry(self, default: Quantization | None) -> Mapping[str, Any] | None:
        """Return the quantization entry of the result's config.json, None to keep the source's."""
        if default is None:
            return None
        made = {name.removesuffix(".weight"): how for name, how in self.quantized.items()}
        matrices = {**self.stored, **made}
        return quantization_entry(most_common(matrices) if self.stored else default, matrices)


def plan_for(directory: Path, numbers: Numbers | None = None) -> Plan:
    """The plan of a directory. Raises CheckpointError, and OptionError where it cannot be quantized
    or dequantized so."""
    numbers = numbers or Numbers()
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    plan = _drafter(directory, config, numbers) or _encoder_decoder(directory, config, numbers)
    if plan is None:
        # By its name: it imports this module, and mlx-lm, which a T5 does not need.
        plan = import_module(".decoder_only", __package__).plan(directory, config, numbers)
    how = numbers.quantization
    if how is not None and plan.stored and plan.format != "gguf":
        raise OptionError(f"{directory} is quantized already: leave --quantize out")
    if how is not None and not (plan.quantized or plan.stored):
        problem = f"no rows divide into groups of {how.group_size}"
        raise OptionError(f"{problem}: give a smaller --q-group-size")
    if numbers.dequantize and not plan.stored:
        raise OptionError("the source is not quantized: leave --dequantize out")
    again = {path for path in plan.stored if f"{path}.weight" in plan.quantized}
    return _dequantized(plan, {*plan.stored} if numbers.dequantize else again)


def unsettled(
    numbers: Numbers, stored: Mapping[str, Quantization], quantized: Mapping[str, Quantization]
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
    weights: Weights, numbers: Numbers, stored: Mapping[str, Quantization]
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


def _dequantized(plan: Plan, paths: Set[str]) -> Plan:
    """Return the plan with whole matrices in the place of the quantized ones at `paths`. If the
    user names no type, they are written in the type of their scales, in bfloat16 if those are
    powers of two. Raises CheckpointError."""
    if not paths:
        return plan
    packed = {path: how for path, how in plan.stored.items() if path in paths}
    parts = [name for name in plan.outlines if _part(packed, name)[0]]
    outlines = {name: outline for name, outline in plan.outlines.items() if name not in parts}
    natural: dict[str, mx.Dtype] = {}
    for path, how in packed.items():
        weight = f"{path}.weight"
        outlines[weight] = _outline(path, plan.outlines, how)
        scales = plan.outlines[f"{path}.scales"].dtype
        natural[weight] = scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16
    report = plan.report
    if plan.format != "gguf":  # whose files have each matrix as one tensor
        joined, computed = (*report.joined, *parts), (*report.computed, *natural)
        report = replace(report, joined=joined, computed=computed)
    return replace(
        plan,
        config={k: v for k, v in plan.config.items() if not k.startswith("quantization")},
        tensors=lambda scratch: _tensors(plan, packed, scratch),
        outlines=outlines,
        stored={path: how for path, how in plan.stored.items() if path not in paths},
        natural=natural,
        report=report,
    )


def _part(matrices: Mapping[str, Quantization], name: str) -> tuple[str, str]:
    """The path and part of a tensor that belongs to a quantized matrix; ("", "") for another."""
    path, _, part = name.rpartition(".")
    return (path, part) if path in matrices and part in ("weight", *PARTS) else ("", "")


def _tensors(
    plan: Plan, packed: Mapping[str, Quantization], scratch: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor. A matrix of `packed` comes as one tensor, after the last of its parts."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in plan.tensors(scratch):
        path, part = _part(packed, name)
        if not path:
            yield name, tensor
            continue
        parts = waiting.setdefault(path, {})
        parts[part] = tensor
        if len(parts) == 1 + len(packed[path].parts):
            yield f"{path}.weight", _whole(waiting.pop(path), packed[path])


def _whole(parts: Mapping[str, Tensor], how: Quantization) -> Tensor:
    scales = parts["scales"]

    def rows(begin: int, end: int) -> mx.array:
        arrays = {part: tensor.rows(begin, end) for part, tensor in parts.items()}
        return how.dequantize(arrays["weight"], arrays["scales"], arrays.get("biases"))

    return Tensor(mx.float32, (*scales.shape[:-1], scales.shape[-1] * how.group_size), rows)


def _outline(path: str, outlines: Mapping[str, mx.array], how: Quantization) -> mx.array:
    """Raises CheckpointError where the parts of a matrix do not fit together."""
    if all(f"{path}.{part}" in outlines for part in ("weight", *how.parts)):
        weight, scales = outlines[f"{path}.weight"], outlines[f"{path}.scales"]
        shape = (*scales.shape[:-1], scales.shape[-1] * how.group_size)
        if weight.shape == (*shape[:-1], shape[-1] * how.bits // 32):
            return mx.zeros(shape, dtype=mx.float32)
    raise CheckpointError(f"{path} is not quantized as config.json says")


def _drafter(directory: Path, config: Mapping[str, Any], numbers: Numbers) -> Plan | None:
    """The plan of a drafter on hidden states: what it reads stays, under this program's names."""
    drafter = kinds.read(directory)
    if drafter is None:
        return None
    if numbers.mixed:
        raise OptionError(f"{numbers.mixed} is for whole models: leave --quant-predicate out")
    stored = drafter.tensors
    if not stored.names:
        raise OptionError(f"{directory} is a part of its target: convert that")
    weights = Weights(directory)
    unread = sorted(weights.infos.keys() - stored.names.values())
    quantized = _quantized(drafter, numbers.quantization)
    return Plan.renamed(
        weights,
        stored.names,
        config,
        report=report_tensors(
            weights.contents,
            stored.names,
            tied={},
            dropped=dict.fromkeys(unread, "drafting does not read it"),
        ),
        stored=stored.quantized,
        quantized=quantized,
        notes=("not quantized: norms and fc",) if quantized else (),
        not_run="a drafter computes nothing without its target; bench measures what it brings",
    )


def _quantized(drafter: DrafterFiles, default: Quantization | None) -> dict[str, Quantization]:
    """All matrices whose rows divide into groups, but what stays in 16 bits."""
    if default is None:
        return {}
    return {
        name: default
        for name, shape in drafter.tensors.shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name.removesuffix(".weight") not in IN_16_BITS
        and shape[-1] % default.group_size == 0
    }


def _encoder_decoder(directory: Path, config: Mapping[str, Any], numbers: Numbers) -> Plan | None:
    """The plan of an encoder-decoder, whose tensors keep Hugging Face's names."""
    if not families.is_encoder_decoder(config):
        return None
    family = families.of_config(config)
    assert isinstance(family, EncoderDecoderFamily)
    weights, places, network = family.opened(directory, config)
    stored = {
        path: Quantization(layer.bits, layer.group_size, layer.mode)
        for path, layer in tree_flatten(network.leaf_modules(), is_leaf=nn.Module.is_module)
        if hasattr(layer, "bits")
    }
    for name, place in places.items():
        kind = weights.infos[place].dtype
        whole = name.rpartition(".")[0] not in stored
        if whole and not mx.issubdtype(DTYPES[kind], mx.floating):
            raise CheckpointError(f"{directory}: {place} holds {kind} instead of weights")
    quantized: dict[str, Quantization] = {}
    if numbers.quantization is not None:
        plain = family.network(config, places)
        chosen = family.quantized(plain, config, numbers.quantization, numbers.mixed)
        quantized = unsettled(numbers, stored, chosen)
    return Plan.renamed(
        weights,
        places,
        config=family.written_config(config, places),
        report=_report(family, weights, places),
        stored=stored,
        quantized=quantized,
        notes=(
            *gguf_notes(weights, numbers, stored),
            *_notes(numbers.quantization, quantized),
        ),
    )


def _report(
    family: EncoderDecoderFamily, weights: Weights, places: Mapping[str, str]
) -> TensorReport:
    """What was left out, and why: copies, tables that only look like copies, what nothing reads."""
    tied, dropped = {}, {}
    for name in sorted(weights.infos.keys() - places.values()):
        original = places.get(family.copies.get(name, ""))
        if original and same(weights.tensor(name), weights.tensor(original)):
            tied[name] = original
        else:
            dropped[name] = family.unused(name)
    return report_tensors(weights.contents, places, tied=tied, dropped=dropped)


def _notes(default: Quantization | None, quantized: Mapping[str, Quantization]) -> Iterator[str]:
    if default is None:
        return
    for bits in sorted({how.bits for how in quantized.values()} - set(range(default.bits + 1))):
        names = [name for name, how in quantized.items() if how.bits == bits]
        yield f"quantized to {bits} bits, they suffer most: {summary_of(names)}"
    yield "not quantized: norms and tables of positions"
