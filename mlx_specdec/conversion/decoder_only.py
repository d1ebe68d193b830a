"""The plan of a decoder-only model: mlx-lm names and joins the tensors, chooses the matrices to
quantize, and says how."""

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import files
from ..checkpoints.files import LM_HEAD
from ..checkpoints.quantization import Quantization, WeightFormat
from ..checkpoints.shards import MTP_LAYERS
from ..checkpoints.tensors import Tensor, summary_of
from ..errors import OptionError
from ..models.drafters import mtp_layers
from ..models.mlx_lm.loader import embedding_of, open_model
from ..system import open_files_kept
from .plan import Plan, gguf_notes
from .report import TensorReport, report_tensors

with open_files_kept():
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model


def plan(directory: Path, config: Mapping[str, Any], weight_format: WeightFormat) -> Plan:
    """Return the plan of a directory. Raises CheckpointError, OptionError."""
    files.read_config(directory)
    source = files.Weights(directory)
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
    return Plan(
        source,
        full_config,
        tensors,
        report=_report(source, origins, computed, full_config, extra),
        stored=stored,
        quantized=quantized,
        keeps_dtype=lambda name: not casts(name),
        notes=(*gguf_notes(source, weight_format), *_notes(how, quantized, extra)),
        extra=extra,
    )


def _notes(
    default: Quantization | None, quantized: Mapping[str, Quantization], extra: Mapping[str, Tensor]
) -> Iterator[str]:
    if extra:
        yield (
            f"the layers for multi-token prediction ({len(extra)} tensors) are kept as they are, "
            f"in {MTP_LAYERS}"
        )
    for exception in dict.fromkeys(how for how in quantized.values() if how != default):
        names = [name for name, how in quantized.items() if how == exception]
        yield f"quantized to {exception.bits} bits, as mlx-lm asks: {summary_of(names)}"


def _report(
    source: files.Weights,
    origins: Mapping[str, str],
    computed: list[str],
    config: Mapping[str, Any],
    extra: Collection[str],
) -> TensorReport:
    """Report every tensor. A tensor counts as joined if mlx-lm neither keeps nor drops it."""
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
