"""The plan of a decoder-only model: whatever mlx-lm makes of the source. What mlx-lm only renames
is read from the source piece by piece; what it computes (joined experts, for one) as a whole."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import dequantize_model

from ..checkpoints import files, mtp_layers
from ..checkpoints.quantization import Quantization, WeightFormat, is_known
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import TensorChange, write_weights
from ..errors import CheckpointError, OptionError
from ..models.mlx_lm.loader import HEAD, embedding_of, open_model
from .plan import Plan, gguf_notes, summary_of, unsettled
from .report import TensorReport, report_tensors


def plan(directory: Path, config: Mapping[str, Any], numbers: WeightFormat) -> Plan:
    files.read_config(directory)
    source = files.Weights(directory)
    for file in source.paths:
        if source.format == "safetensors" and not file.name.startswith("model"):
            raise CheckpointError(f"{file} needs a name that starts with model, for mlx-lm")
    given = _arrays(source)
    opened = open_model(directory, config, source, given)
    whole = opened.config
    stored_as = {id(array): name for name, array in given.items()}
    places = {name: stored_as.get(id(array)) for name, array in opened.weights.items()}
    origins = {name: place for name, place in places.items() if place is not None}
    how = numbers.quantization
    stored = opened.quantized
    quantized: dict[str, Quantization] = {}
    if how is not None:
        # A matrix that a GGUF file has quantized may be quantized again.
        model = dequantize_model(opened.model) if source.format == "gguf" else opened.model
        quantized = unsettled(numbers, stored, _choose(model, how, numbers.mixed))
    if "vision_tower" not in getattr(opened.model, "model", {}):
        whole.pop("vision_config", None)
    casts = getattr(opened.model, "cast_predicate", lambda name: True)
    outlines = {
        name: mx.zeros(array.shape, dtype=array.dtype) for name, array in opened.weights.items()
    }
    scratch_nbytes = sum(info.nbytes for info in source.infos.values())
    computed = outlines.keys() - origins.keys()
    extra = mtp_layers.tensors(directory, config, source)
    del opened, given  # their arrays keep what they were made from

    def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
        fresh = {}
        if computed:
            fresh = open_model(directory, config, source, _arrays(source, scratch)).weights
        for name in outlines:
            here = name in origins
            yield name, source.tensor(origins[name]) if here else Tensor.of(fresh.pop(name))

    return Plan(
        config=whole,
        tensors=tensors,
        outlines=outlines,
        report=_report(source, origins, sorted(computed), whole, extra),
        format=source.format,
        paths=source.paths,
        scratch_nbytes=0 if source.lazy or not computed else scratch_nbytes,
        stored=stored,
        quantized=quantized,
        keeps_dtype=lambda name: not casts(name),
        notes=(*gguf_notes(source, numbers, stored), *_notes(how, quantized, extra)),
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
    for other in dict.fromkeys(how for how in quantized.values() if how != default):
        names = [name for name, how in quantized.items() if how == other]
        yield f"quantized to {other.bits} bits, as mlx-lm asks: {summary_of(names)}"


def _report(
    source: files.Weights,
    origins: Mapping[str, str],
    computed: list[str],
    config: Mapping[str, Any],
    extra: Collection[str],
) -> TensorReport:
    """What mlx-lm makes of each tensor: joined where it is not known to keep it or leave it out."""
    places = {**origins, **{name: name for name in extra if name in source.infos}}
    left = sorted(source.infos.keys() - places.values())
    tied: dict[str, str] = {}
    dropped: dict[str, str] = {}
    headless = not any(name.endswith(HEAD) for name in (*computed, *origins))
    for name in left:
        if headless and name.endswith(HEAD) and (twin := embedding_of(name, source)):
            tied[name] = twin
        elif headless and name.endswith(HEAD):
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
    """Lazy arrays for mlx-lm. Those of other formats than safetensors have values only if they are
    written into `scratch` first."""
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
    """Choose what mlx-lm's converter would quantize, and how. Raises OptionError."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    if mixed:
        try:
            own = mixed_quant_predicate_builder(mixed, model, default.group_size)
        except ValueError as problem:
            raise OptionError(f"{mixed} does not suit this model: {problem}") from problem
    chosen = {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        answer = own(path, module) if hasattr(module, "to_quantized") else False
        how = default
        if isinstance(answer, Mapping):
            how = Quantization(**{**default.as_dict(), "mode": "affine", **answer})
            if not is_known(how):
                raise OptionError(f"mlx-lm quantizes {path} in a way that is not supported here")
        widths = {default.group_size, how.group_size}
        if answer and not any(module.weight.shape[-1] % width for width in widths):
            chosen[f"{path}.weight"] = how
    return chosen
