"""The plan of a T5, whose tensors keep Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...checkpoints import files
from ...checkpoints import t5_keys as keys
from ...checkpoints.quantization import PARTS, Numbers, Quantization, stored_quantization
from ...checkpoints.tensors import DTYPES, check_weights, same
from ...errors import CheckpointError
from ..report import TensorReport, report_tensors
from . import Plan, check_divides, summary_of

Shapes = Mapping[str, tuple[int, ...]]


def plan(directory: Path, config: Mapping[str, Any], numbers: Numbers) -> Plan | None:
    if not keys.is_encoder_decoder(config):
        return None
    weights = files.Weights(directory)
    keys.check_generates(directory, config, weights.infos)
    places = keys.names(weights.infos)
    own_head = _own_head(weights, places)
    if not own_head:
        places = keys.without_head(places)
    shapes = keys.t5_shapes(config, own_head=own_head)
    entry = stored_quantization(config) or {}
    paths = (name.removesuffix(".scales") for name in places if name.endswith(".scales"))
    stored = {
        path: Quantization.of(entry, path) for path in paths if entry and f"{path}.weight" in shapes
    }
    try:
        _check(weights, places, shapes, stored)
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from None
    quantized = _quantized(config, shapes, numbers)
    return Plan.renamed(
        weights,
        places,
        config={
            **config,
            "tie_word_embeddings": not own_head,
            "scale_decoder_outputs": keys.scales_output(config),
        },
        report=_report(weights, places),
        stored=stored,
        quantized=quantized,
        notes=(*weights.notes, *_notes(numbers.quantization, quantized)),
    )


def _own_head(weights: files.Weights, places: Mapping[str, str]) -> bool:
    """Return whether the output head is there and differs from `shared`."""
    if keys.HEAD not in places:
        return False
    for part in ("weight", *PARTS):
        head, shared = (places.get(f"{path}.{part}") for path in ("lm_head", "shared"))
        if (head is None) != (shared is None):
            return True
        if head and shared and not same(weights.tensor(head), weights.tensor(shared)):
            return True
    return False


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


def _quantized(
    config: Mapping[str, Any], shapes: Shapes, numbers: Numbers
) -> dict[str, Quantization]:
    default = numbers.quantization
    if default is None:
        return {}
    chosen = {
        name: how
        for name, shape in shapes.items()
        if (how := keys.quantization_of(config, name, shape, default, numbers.mixed)) is not None
    }
    check_divides(chosen, default.group_size)
    return chosen


def _report(weights: files.Weights, places: Mapping[str, str]) -> TensorReport:
    """What was left out, and why: copies of the embedding, tables that only look like copies, and
    positions that nothing reads."""
    shared = places[keys.SHARED]
    tied, dropped = {}, {}
    for name in sorted(weights.infos.keys() - places.values()):
        # A head that is left out was compared, and is a copy.
        if name in keys.TWINS and not same(weights.tensor(name), weights.tensor(shared)):
            dropped[name] = f"no copy, but T5 reads the words of both its halves from {shared}"
        elif name in keys.TWINS or name.startswith("lm_head."):
            tied[name] = shared
        else:
            dropped[name] = keys.UNUSED
    return report_tensors(weights.contents, places, tied=tied, dropped=dropped)


def _notes(default: Quantization | None, quantized: Mapping[str, Quantization]) -> Iterator[str]:
    if default is None:
        return
    for bits in sorted({how.bits for how in quantized.values()} - set(range(default.bits + 1))):
        names = [name for name, how in quantized.items() if how.bits == bits]
        yield f"quantized to {bits} bits, they suffer most: {summary_of(names)}"
    yield "not quantized: norms and relative attention biases"
