"""Plans of conversions, made from headers before any weight is read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints.disk import read_json
from ..checkpoints.files import Weights
from ..checkpoints.quantization import ALL_PARTS, Quantization, WeightFormat
from ..checkpoints.tensors import DTYPES, MAY_BE_COPIES, Tensor, same, summary_of
from ..errors import CheckpointError, OptionError
from ..models.drafters import kinds
from ..models.drafters.files import IN_16_BITS
from ..models.encoder_decoder.family import EncoderDecoderFamily
from ..models.loading import family_of_config, is_encoder_decoder
from .plan import Plan, gguf_notes
from .report import TensorReport, report_tensors


def plan_for(directory: Path, weight_format: WeightFormat | None = None) -> Plan:
    """Return the plan of a directory. Raises CheckpointError, and OptionError if the model cannot
    have the requested format."""
    weight_format = weight_format or WeightFormat()
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    plan = _drafter(directory, config, weight_format) or _encoder_decoder(
        directory, config, weight_format
    )
    if plan is None:
        from . import decoder_only  # imports mlx-lm, which a T5 does not need

        plan = decoder_only.plan(directory, config, weight_format)
    how = weight_format.quantization
    if how is not None and plan.stored:
        raise OptionError(
            f"{directory} is quantized already: leave --quantize out, or write it with "
            "--dequantize first and quantize the result"
        )
    if how is not None and not plan.quantized:
        problem = f"no rows divide into groups of {how.group_size}"
        raise OptionError(f"{problem}: give a smaller --q-group-size")
    if not weight_format.dequantize:
        return plan
    if not plan.stored:
        raise OptionError("the source is not quantized: leave --dequantize out")
    return _dequantized(plan)


def _dequantized(plan: Plan) -> Plan:
    """Return the plan with its quantized matrices dequantized. Their default dtype is the dtype of
    the scales, or bfloat16 if scales are powers of two."""
    tensors: dict[str, Tensor] = {}
    natural: dict[str, mx.Dtype] = {}
    for name, tensor in plan.tensors.items():
        path, _, part = name.rpartition(".")
        if path not in plan.stored or part not in ALL_PARTS:
            tensors[name] = tensor
        elif part == "weight":
            tensors[name] = _whole(path, plan.tensors, plan.stored[path])
            scales = plan.tensors[f"{path}.scales"].dtype
            natural[name] = scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16
    report = plan.report
    if plan.weights.format != "gguf":  # a matrix is a single tensor in GGUF files
        parts = [name for name in plan.tensors if name not in tensors or name in natural]
        joined, computed = (*report.joined, *parts), (*report.computed, *natural)
        report = replace(report, joined=joined, computed=computed)
    return replace(
        plan,
        config={k: v for k, v in plan.config.items() if not k.startswith("quantization")},
        tensors=tensors,
        stored={},
        natural=natural,
        report=report,
    )


def _whole(path: str, tensors: Mapping[str, Tensor], how: Quantization) -> Tensor:
    """Return the float32 values of a quantized matrix, whose parts fit together."""
    parts = [tensors[f"{path}.{part}"] for part in ("weight", *how.parts)]
    *rows, groups = parts[1].shape
    return Tensor(
        mx.float32,
        (*rows, groups * how.group_size),
        lambda begin, end: how.dequantize(*(part.rows(begin, end) for part in parts)),
    )


def _drafter(
    directory: Path, config: Mapping[str, Any], weight_format: WeightFormat
) -> Plan | None:
    """Return the plan of a hidden-state drafter, with the tensors that drafting reads, renamed to
    this program's names; None for another model."""
    drafter = kinds.read(directory)
    if drafter is None:
        return None
    if weight_format.mixed:
        raise OptionError(f"{weight_format.mixed} is for whole models: leave --quant-predicate out")
    stored = drafter.tensors
    if not stored.names:
        raise OptionError(f"{directory} is a part of its target: convert that")
    weights = Weights(directory)
    unread = sorted(weights.infos.keys() - stored.names.values())
    how = weight_format.quantization
    # All matrices whose rows divide into groups, except those that stay in 16 bits.
    quantized = {
        name: how
        for name, shape in stored.shapes.items()
        if how is not None
        and len(shape) == 2
        and name.endswith(".weight")
        and name.removesuffix(".weight") not in IN_16_BITS
        and shape[-1] % how.group_size == 0
    }
    return Plan(
        weights,
        config,
        {name: weights.tensor(place) for name, place in stored.names.items()},
        report=report_tensors(
            weights,
            stored.names,
            tied={},
            dropped=dict.fromkeys(unread, "drafting does not read it"),
        ),
        stored=stored.quantized,
        quantized=quantized,
        notes=("not quantized: norms and fc",) if quantized else (),
        not_run="a drafter computes nothing without its target; bench measures what it brings",
    )


def _encoder_decoder(
    directory: Path, config: Mapping[str, Any], weight_format: WeightFormat
) -> Plan | None:
    """Return the plan of an encoder-decoder model, whose tensors keep Hugging Face's names; None
    for another model."""
    if not is_encoder_decoder(config):
        return None
    family = family_of_config(config)
    assert isinstance(family, EncoderDecoderFamily)
    weights, places, network = family.opened(directory, config)
    stored = {
        path: Quantization(layer.bits, layer.group_size, layer.mode)
        for path, layer in tree_flatten(network.leaf_modules(), is_leaf=nn.Module.is_module)
        if hasattr(layer, "bits")
    }
    for name, place in places.items():
        kind = weights.infos[place].dtype
        is_plain = name.rpartition(".")[0] not in stored
        if is_plain and not mx.issubdtype(DTYPES[kind], mx.floating):
            raise CheckpointError(f"{directory}: {place} holds {kind} instead of weights")
    quantized: dict[str, Quantization] = {}
    if weight_format.quantization is not None:
        plain = family.network(config, places)
        quantized = family.quantized(plain, config, weight_format.quantization, weight_format.mixed)
    return Plan(
        weights,
        family.written_config(config, places),
        {name: weights.tensor(place) for name, place in places.items()},
        report=_report(weights, places),
        stored=stored,
        quantized=quantized,
        notes=(
            *gguf_notes(weights, weight_format),
            *_notes(weight_format.quantization, quantized),
        ),
    )


def _report(weights: Weights, places: Mapping[str, str]) -> TensorReport:
    """Report tensors that are left out: copies, and tensors that the model does not read."""
    tied, dropped = {}, {}
    for name in sorted(weights.infos.keys() - places.values()):
        tensor, read = weights.tensor(name), places.values() if MAY_BE_COPIES.search(name) else ()
        if original := next((other for other in read if same(tensor, weights.tensor(other))), None):
            tied[name] = original
        else:
            dropped[name] = "the model has no such tensor"
    return report_tensors(weights, places, tied=tied, dropped=dropped)


def _notes(default: Quantization | None, quantized: Mapping[str, Quantization]) -> Iterator[str]:
    if default is None:
        return
    for bits in sorted({how.bits for how in quantized.values()} - set(range(default.bits + 1))):
        names = [name for name, how in quantized.items() if how.bits == bits]
        yield f"quantized to {bits} bits, they suffer most: {summary_of(names)}"
    yield "not quantized: norms and tables of positions"
