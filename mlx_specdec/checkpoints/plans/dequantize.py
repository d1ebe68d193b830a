"""A plan whose quantized matrices become whole on the way, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ...errors import CheckpointError, OptionError
from ..quantization import PARTS, Quantization
from ..tensors import Tensor
from .plan import Plan


def dequantized(plan: Plan) -> Plan:
    """The same, with whole matrices in the place of quantized ones and no quantization entry.

    Values are computed in float32; unless another type is asked for they are written in that of
    their scales, bfloat16 where scales are powers of two. Raises OptionError where nothing is
    quantized, CheckpointError where it is not as config.json says.
    """
    if not plan.stored:
        raise OptionError("the source is not quantized: leave --dequantize out")
    outlines = {name: each for name, each in plan.outlines.items() if not _part(plan, name)[0]}
    natural: dict[str, mx.Dtype] = {}
    for path, how in plan.stored.items():
        weight = f"{path}.weight"
        outlines[weight] = _outline(path, plan.outlines, how)
        scales = plan.outlines[f"{path}.scales"].dtype
        natural[weight] = scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16
    joined = (name for name in plan.outlines if _part(plan, name)[0])
    report = plan.report
    return replace(
        plan,
        config={k: v for k, v in plan.config.items() if not k.startswith("quantization")},
        tensors=lambda scratch: _tensors(plan, scratch),
        outlines=outlines,
        stored={},
        natural=natural,
        report=replace(
            report, joined=(*report.joined, *joined), computed=(*report.computed, *natural)
        ),
    )


def _part(plan: Plan, name: str) -> tuple[str, str]:
    """The path and part of a tensor that belongs to a quantized matrix; ("", "") for another."""
    path, _, part = name.rpartition(".")
    return (path, part) if path in plan.stored and part in ("weight", *PARTS) else ("", "")


def _tensors(plan: Plan, scratch: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor; a matrix when the last of its parts has come, none of which is read before."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in plan.tensors(scratch):
        path, part = _part(plan, name)
        if not path:
            yield name, tensor
            continue
        parts = waiting.setdefault(path, {})
        parts[part] = tensor
        if len(parts) == 1 + len(plan.stored[path].parts):
            yield f"{path}.weight", _whole(waiting.pop(path), plan.stored[path])


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
