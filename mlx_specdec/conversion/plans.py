"""Plans of conversions, made from headers before any weight is read."""

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints.disk import read_json
from ..checkpoints.files import LM_HEAD, Weights, read_config
from ..checkpoints.formats.gguf_blocks import TYPES
from ..checkpoints.quantization import ALL_PARTS, Quantization, WeightFormat
from ..checkpoints.shards import MTP_LAYERS
from ..checkpoints.tensors import DTYPES, MAY_BE_COPIES, Tensor, same, summary_of
from ..errors import CheckpointError, OptionError
from ..models.drafters import kinds, mtp_layers
from ..models.drafters.files import IN_16_BITS, DrafterFiles
from ..models.encoder_decoder.family import EncoderDecoderFamily
from ..models.loading import family_of_config, is_encoder_decoder
from .report import Plan, TensorReport, report_tensors


def plan_for(directory: Path, weight_format: WeightFormat | None = None) -> Plan:
    """Return the plan of a directory. Raises CheckpointError, and OptionError if the model cannot
    have the requested format."""
    weight_format = weight_format or WeightFormat()
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    if drafter := kinds.read(directory):
        plan = _drafter(directory, config, weight_format, drafter)
    elif is_encoder_decoder(config):
        plan = _encoder_decoder(directory, config, weight_format)
    else:
        plan = _decoder_only(directory, config, weight_format)
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
        return replace(plan, notes=(*_kept(plan.weights), *plan.notes))
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
        lambda: how.dequantize(*(part.read() for part in parts)),
    )


def _drafter(
    directory: Path, config: Mapping[str, Any], weight_format: WeightFormat, drafter: DrafterFiles
) -> Plan:
    """Return the plan of a hidden-state drafter, with the tensors that drafting reads, renamed to
    this program's names."""
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
) -> Plan:
    """Return the plan of an encoder-decoder model, whose tensors keep Hugging Face's names."""
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
            *_exceptions(quantized, weight_format, "they suffer most"),
            *(("not quantized: norms and tables of positions",) if quantized else ()),
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


def _decoder_only(directory: Path, config: Mapping[str, Any], weight_format: WeightFormat) -> Plan:
    """Return the plan of a model of mlx-lm, which names and joins the tensors, chooses the matrices
    to quantize, and says how. Raises CheckpointError, OptionError."""
    from ..models.mlx_lm.loader import open_model  # imports mlx-lm, which a T5 does not need

    read_config(directory)
    source = Weights(directory)
    read = source.read if source.lazy else lambda name: source.tensor(name).outline
    arrays = {name: read(name) for name in source.infos}
    opened = open_model(directory, config, source, {**arrays})
    places = {id(array): name for name, array in arrays.items()}
    named = {name: places.get(id(array)) for name, array in opened.weights.items()}
    origins = {name: place for name, place in named.items() if place is not None}
    computed = sorted(opened.weights.keys() - origins.keys())

    @cache
    def in_memory() -> dict[str, mx.array]:
        # Only torch's files come here, whose tensors are all in memory then.
        tensors = {name: source.read(name) for name in source.infos}
        return open_model(directory, config, source, tensors).weights

    def tensor(name: str, array: mx.array) -> Tensor:
        if name in origins:
            return source.tensor(origins[name])
        if source.lazy:
            return Tensor.of(array)
        return Tensor(array.dtype, array.shape, lambda: in_memory()[name])

    how = weight_format.quantization
    stored = opened.quantized
    full_config = opened.config
    tensors = {name: tensor(name, array) for name, array in opened.weights.items()}
    if "vision_tower" not in getattr(opened.model, "model", {}):
        full_config.pop("vision_config", None)
    casts = getattr(opened.model, "cast_predicate", lambda name: True)
    quantized = {} if how is None else _chosen(opened.model, how, weight_format.mixed)
    extra = mtp_layers.tensors(directory, config, source)
    notes: list[str] = []
    if extra:
        count = f"the layers for multi-token prediction ({len(extra)} tensors)"
        notes.append(f"{count} are kept as they are, in {MTP_LAYERS}")
    return Plan(
        source,
        full_config,
        tensors,
        report=_report_of_joined(source, origins, computed, extra),
        stored=stored,
        quantized=quantized,
        keeps_dtype=lambda name: not casts(name),
        notes=(*notes, *_exceptions(quantized, weight_format, "as mlx-lm asks")),
        extra=extra,
    )


def _report_of_joined(
    source: Weights, origins: Mapping[str, str], computed: list[str], extra: Collection[str]
) -> TensorReport:
    """Report every tensor. A tensor counts as joined if mlx-lm neither keeps nor drops it."""
    from ..models.mlx_lm.loader import embedding_of

    places = {**origins, **{name: name for name in extra if name in source.infos}}
    left = sorted(source.infos.keys() - places.values())
    tied: dict[str, str] = {}
    dropped: dict[str, str] = {}
    headless = not any(name.endswith(LM_HEAD) for name in (*computed, *origins))
    for name in left:
        if headless and name.endswith(LM_HEAD):
            tied[name] = embedding_of(name, source) or "the embedding"
        elif name.endswith(("inv_freq", "rope.freqs")):
            dropped[name] = "it follows from config.json"
        elif not computed:
            dropped[name] = "mlx-lm's model has no such tensor"
    joined = [name for name in left if name not in tied and name not in dropped]
    return report_tensors(
        source, places, tied=tied, dropped=dropped, joined=joined, computed=computed
    )


def _chosen(model: nn.Module, default: Quantization, mixed: str) -> dict[str, Quantization]:
    """Return the matrices that mlx-lm's converter quantizes, and how. Raises OptionError."""
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model

    predicate, size = None, default.group_size
    try:
        if mixed:
            predicate = mixed_quant_predicate_builder(mixed, model, size)
        with contextlib.redirect_stdout(io.StringIO()):
            quantize_model(model, {}, size, default.bits, default.mode, quant_predicate=predicate)
    except ValueError as problem:
        raise OptionError(
            f"{mixed or default.mode} does not suit this model: {problem}"
        ) from problem
    return {
        f"{path}.weight": Quantization(module.bits, module.group_size, module.mode)
        for path, module in model.named_modules()
        if hasattr(module, "bits")
    }


def _exceptions(
    quantized: Mapping[str, Quantization], weight_format: WeightFormat, why: str
) -> Iterator[str]:
    """Yield sentences about the matrices that are not quantized as the user asks."""
    default = weight_format.quantization
    exceptions = dict.fromkeys(how for how in quantized.values() if how != default)
    for exception in sorted(exceptions, key=lambda how: how.bits):
        names = [name for name, how in quantized.items() if how == exception]
        yield f"quantized to {exception.bits} bits, {why}: {summary_of(names)}"


def _kept(weights: Weights) -> Iterator[str]:
    """Yield sentences about GGUF's quantized types that a conversion keeps."""
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
