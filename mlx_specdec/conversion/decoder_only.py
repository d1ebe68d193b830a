"""The plan of a decoder-only model, with the tensors that mlx-lm makes of the source. A tensor that
mlx-lm only renames is read piece by piece. A tensor that mlx-lm computes, such as joined experts,
is in memory at once."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import files, mtp_layers
from ..checkpoints.files import LM_HEAD
from ..checkpoints.quantization import Quantization, WeightFormat, is_known
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import TensorChange, write_weights
from ..errors import CheckpointError, OptionError
from ..models.mlx_lm.loader import embedding_of, open_model
from ..system import open_files_kept
from .plan import Plan, gguf_notes, summary_of, unsettled
from .report import TensorReport, report_tensors

with open_files_kept():
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import dequantize_model


def plan(directory: Path, config: Mapping[str, Any], weight_format: WeightFormat) -> Plan:
    """Return the plan of a directory. Raises CheckpointError, OptionError."""
    files.read_config(directory)
    source = files.Weights(directory)
    for file in source.paths:
        if source.format == "safetensors" and not file.name.startswith("model"):
            raise CheckpointError(f"{file} needs a name that starts with model, for mlx-lm")
    arrays = _arrays(source)
    opened = open_model(directory, config, source, arrays)
    full_config = opened.config
    stored_as = {id(array): name for name, array in arrays.items()}
    places = {name: stored_as.get(id(array)) for name, array in opened.weights.items()}
    origins = {name: place for name, place in places.items() if place is not None}
    how = weight_format.quantization
    stored = opened.quantized
    quantized: dict[str, Quantization] = {}
    if how is not None:
        # Quantized matrices of a GGUF file may be quantized again.
        model = dequantize_model(opened.model) if source.format == "gguf" else opened.model
        quantized = unsettled(weight_format, stored, _choose(model, how, weight_format.mixed))
    if "vision_tower" not in getattr(opened.model, "model", {}):
        full_config.pop("vision_config", None)
    casts = getattr(opened.model, "cast_predicate", lambda name: True)
    outlines = {
        name: mx.zeros(array.shape, dtype=array.dtype) for name, array in opened.weights.items()
    }
    scratch_nbytes = sum(info.nbytes for info in source.infos.values())
    computed = outlines.keys() - origins.keys()
    extra = mtp_layers.tensors(directory, config, source)
    del opened, arrays  # lazy arrays hold the memory of their sources

    def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
        fresh = {}
        if computed:
            fresh = open_model(directory, config, source, _arrays(source, scratch)).weights
        for name in outlines:
            here = name in origins
            yield name, source.tensor(origins[name]) if here else Tensor.of(fresh.pop(name))

    return Plan(
        config=full_config,
        tensors=tensors,
        outlines=outlines,
        report=_report(source, origins, sorted(computed), full_config, extra),
        format=source.format,
        paths=source.paths,
        scratch_nbytes=0 if source.lazy or not computed else scratch_nbytes,
        stored=stored,
        quantized=quantized,
        keeps_dtype=lambda name: not casts(name),
        notes=(*gguf_notes(source, weight_format, stored), *_notes(how, quantized, extra)),
        extra=extra,
    )


def _notes(
    default: Quantization | None, quantized: Mapping[str, Quantization], extra: Mapping[str, Tensor]
) -> Iterator[str]:
    if extra:
        yield (
            f"the layers for multi-token prediction ({len(extra)} tensors) are kept as they are, "
            f"in {mtp_layers.FILE}"
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
        if headless and name.endswith(LM_HEAD) and (twin := embedding_of(name, source)):
            tied[name] = twin
        elif headless and name.endswith(LM_HEAD):
            dropped[name] = "config.json ties it to the embedding"
        elif name.endswith(("inv_freq", "rope.freqs")):
            dropped[name] = "it follows from config.json"
        elif not computed:
            dropped[name] = "mlx-lm's model has no such tensor"
    joined = [name for name in left if name not in tied and name not in dropped]
    return report_tensors(
        source.contents, places, tied=tied, dropped=dropped, joined=joined, computed=computed
    )


def _arrays(source: files.Weights, scratch: Path | None = None) -> dict[str, mx.array]:
    """Return lazy arrays for mlx-lm. Tensors of other formats than safetensors are first written to
    `scratch`. Without `scratch` their arrays have only shapes and dtypes."""
    if source.lazy:
        return {name: source.read(name) for name in source.infos}
    if scratch is None:
        return {name: source.tensor(name).outline for name in source.infos}
    if not scratch.is_dir():
        scratch.mkdir()
        pairs = ((name, source.tensor(name)) for name in source.infos)
        write_weights(scratch, pairs, lambda name, tensor: TensorChange(), shard_bytes=2**62)
    return dict(files.tensors(scratch))


def _choose(model: Any, default: Quantization, mixed: str) -> dict[str, Quantization]:
    """Return the matrices that mlx-lm's converter would quantize, and how. Raises OptionError."""
    predicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    if mixed:
        try:
            predicate = mixed_quant_predicate_builder(mixed, model, default.group_size)
        except ValueError as problem:
            raise OptionError(f"{mixed} does not suit this model: {problem}") from problem
    chosen = {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        answer = predicate(path, module) if hasattr(module, "to_quantized") else False
        how = default
        if isinstance(answer, Mapping):
            how = Quantization(**{**default.as_dict(), "mode": "affine", **answer})
            if not is_known(how):
                raise OptionError(f"mlx-lm quantizes {path} in a way that is not supported here")
        widths = {default.group_size, how.group_size}
        if answer and not any(module.weight.shape[-1] % width for width in widths):
            chosen[f"{path}.weight"] = how
    return chosen
