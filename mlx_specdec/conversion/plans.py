"""Make the plan of a conversion before anything is read."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints.disk import read_json
from ..checkpoints.files import Weights
from ..checkpoints.quantization import PARTS, Quantization, WeightFormat
from ..checkpoints.tensors import DTYPES, Tensor, same
from ..errors import CheckpointError, OptionError
from ..models import families
from ..models.drafters import kinds
from ..models.drafters.files import IN_16_BITS, DrafterFiles
from ..models.encoder_decoder.family import EncoderDecoderFamily
from .plan import Plan, gguf_notes, summary_of, unsettled
from .report import TensorReport, report_tensors


def plan_for(directory: Path, numbers: WeightFormat | None = None) -> Plan:
    """The plan of a directory. Raises CheckpointError, and OptionError where it cannot be quantized
    or dequantized so."""
    numbers = numbers or WeightFormat()
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    plan = _drafter(directory, config, numbers) or _encoder_decoder(directory, config, numbers)
    if plan is None:
        from . import decoder_only  # imports mlx-lm, which a T5 does not need

        plan = decoder_only.plan(directory, config, numbers)
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


def _drafter(directory: Path, config: Mapping[str, Any], numbers: WeightFormat) -> Plan | None:
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


def _encoder_decoder(
    directory: Path, config: Mapping[str, Any], numbers: WeightFormat
) -> Plan | None:
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
