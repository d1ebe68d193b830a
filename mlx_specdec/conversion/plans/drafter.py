"""The plan of a drafter on hidden states: what it reads stays, under this program's names.

What is not read, a copy of the target's embedding or what only training needs, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...checkpoints import files
from ...checkpoints.quantization import Numbers, Quantization
from ...checkpoints.tensors import Tensor
from ...errors import OptionError
from ...models.drafters.files import IN_16_BITS, DrafterFiles
from ..report import report_tensors
from .plan import Plan

NOT_RUN = "a drafter computes nothing without its target; bench measures what it brings"


def drafter_plan(
    directory: Path, config: Mapping[str, Any], drafter: DrafterFiles, numbers: Numbers
) -> Plan:
    """See `plan_for`. drafter: what the directory holds."""
    if numbers.mixed:
        raise OptionError(
            f"{numbers.mixed} is for whole models: leave --quant-predicate out for a drafter"
        )
    stored = drafter.tensors
    if not stored.names:
        raise OptionError(
            f"layers for multi-token prediction are kept with their target: convert that, not "
            f"{directory}"
        )
    weights = files.Weights(directory)
    places = stored.names
    quantized = _quantized(drafter, numbers.quantization)

    def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
        for name, place in places.items():
            yield name, weights.tensor(place)

    return Plan(
        config=config,
        tensors=tensors,
        outlines={name: weights.tensor(place).outline for name, place in places.items()},
        report=report_tensors(
            weights.contents,
            places,
            tied={},
            dropped=dict.fromkeys(
                sorted(weights.infos.keys() - places.values()),
                "drafting does not read it",
            ),
        ),
        format=weights.format,
        paths=weights.paths,
        stored=stored.quantized,
        quantized=quantized,
        notes=("not quantized: norms and fc",) if quantized else (),
        not_run=NOT_RUN,
    )


def _quantized(drafter: DrafterFiles, default: Quantization | None) -> dict[str, Quantization]:
    """All matrices whose rows divide into groups, but what stays in 16 bits. Raises OptionError."""
    if default is None:
        return {}
    chosen = {
        name: default
        for name, shape in drafter.tensors.shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name.removesuffix(".weight") not in IN_16_BITS
        and shape[-1] % default.group_size == 0
    }
    if not chosen:
        raise OptionError(
            f"no matrix's rows divide into groups of {default.group_size}: give a smaller "
            "--q-group-size"
        )
    return chosen
