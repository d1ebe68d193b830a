"""The plan of a drafter on hidden states: what it reads stays, under this program's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints import files
from ...checkpoints.quantization import Numbers, Quantization
from ...errors import OptionError
from ...models.drafters import kinds
from ...models.drafters.files import IN_16_BITS, DrafterFiles
from ..report import report_tensors
from . import Plan, check_divides

NOT_RUN = "a drafter computes nothing without its target; bench measures what it brings"


def plan(directory: Path, config: Mapping[str, Any], numbers: Numbers) -> Plan | None:
    drafter = kinds.read(directory)
    if drafter is None:
        return None
    if numbers.mixed:
        raise OptionError(f"{numbers.mixed} is for whole models: leave --quant-predicate out")
    stored = drafter.tensors
    if not stored.names:
        raise OptionError(f"{directory} is a part of its target: convert that")
    weights = files.Weights(directory)
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
    check_divides(chosen, default.group_size)
    return chosen
