"""The plan of an encoder-decoder, whose tensors keep Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...checkpoints import files
from ...checkpoints.quantization import Numbers, Quantization, stored_quantization
from ...checkpoints.tensors import DTYPES, check_weights, same
from ...errors import CheckpointError
from ...models import families
from ...models.encoder_decoder.family import EncoderDecoderFamily
from ..report import TensorReport, report_tensors
from . import Plan, check_divides, summary_of

Shapes = Mapping[str, tuple[int, ...]]


def plan(directory: Path, config: Mapping[str, Any], numbers: Numbers) -> Plan | None:
    if not families.is_encoder_decoder(config):
        return None
    family = families.of_config(config)
    assert isinstance(family, EncoderDecoderFamily)
    weights = files.Weights(directory)
    places = family.places(directory, config, weights)
    entry = stored_quantization(config) or {}
    try:
        network = family.network(config, places)
        shapes = {name: array.shape for name, array in tree_flatten(network.parameters())}
        paths = (name.removesuffix(".scales") for name in places if name.endswith(".scales"))
        stored = {
            path: Quantization.of(entry, path)
            for path in paths
            if entry and f"{path}.weight" in shapes
        }
        _check(weights, places, shapes, stored)
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from None
    quantized: dict[str, Quantization] = {}
    if numbers.quantization is not None:
        quantized = family.quantized(network, config, numbers.quantization, numbers.mixed)
        check_divides(quantized, numbers.quantization.group_size)
    return Plan.renamed(
        weights,
        places,
        config=family.written_config(config, places),
        report=_report(family, weights, places),
        stored=stored,
        quantized=quantized,
        notes=(*weights.notes, *_notes(numbers.quantization, quantized)),
    )


def _check(
    weights: files.Weights,
    places: Mapping[str, str],
    shapes: Shapes,
    stored: Mapping[str, Quantization],
) -> None:
    whole = {name: place for name, place in places.items() if name.rpartition(".")[0] not in stored}
    expected = {
        name: shape for name, shape in shapes.items() if name in whole or name not in places
    }
    check_weights(expected, {name: weights.infos[place].shape for name, place in whole.items()})
    for place in whole.values():
        kind = weights.infos[place].dtype
        if not mx.issubdtype(DTYPES[kind], mx.floating):
            raise CheckpointError(f"{place} holds {kind} instead of weights")


def _report(
    family: EncoderDecoderFamily, weights: files.Weights, places: Mapping[str, str]
) -> TensorReport:
    """What was left out, and why: copies of tensors, tables that only look like copies, and what
    nothing reads."""
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
