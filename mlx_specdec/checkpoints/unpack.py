"""A recipe whose packed matrices are unpacked on the way, a few rows at a time.

Knows MLX's packings as config.json has them. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, OptionError
from . import keys
from .keys import Quantisation
from .recipes import Recipe
from .tensors import Tensor


def dequantised(recipe: Recipe) -> Recipe:
    """The same, with whole matrices in the place of packed ones and no quantization entry.

    Values are computed in float32; unless another type is asked for they are written in that of
    their scales, bfloat16 where scales are powers of two. Raises OptionError where nothing is
    packed, CheckpointError where config.json does not say how.
    """
    entry = keys.quantization(recipe.config)
    paths = [name.removesuffix(".scales") for name in recipe.outlines if name.endswith(".scales")]
    if entry is None or not paths:
        raise OptionError("the source is not quantised: leave --dequantize out")
    packed = {path: _how(entry, path) for path in paths}
    outlines: dict[str, mx.array] = {}
    for name, outline in recipe.outlines.items():
        path, _, part = name.rpartition(".")
        if path not in packed or part not in ("weight", *keys.PACKED):
            outlines[name] = outline
        elif part == "weight":
            outlines[name] = _outline(path, recipe.outlines, packed[path])
    config = {
        key: value
        for key, value in recipe.config.items()
        if key not in ("quantization", "quantization_config")
    }
    natural = {f"{path}.weight": _natural(recipe.outlines[f"{path}.scales"]) for path in paths}
    parts = [f"{path}.{part}" for path in paths for part in ("weight", *keys.PACKED)]
    computed = tuple(f"{path}.weight" for path in paths)
    joined = tuple(part for part in parts if part in recipe.outlines)
    return replace(
        recipe,
        config=config,
        tensors=lambda scratch: _unpacked(recipe, scratch, packed),
        outlines=outlines,
        natural=natural,
        account=replace(
            recipe.account,
            joined=(*recipe.account.joined, *joined),
            computed=(*recipe.account.computed, *computed),
        ),
    )


def _unpacked(
    recipe: Recipe, scratch: Path, packed: Mapping[str, Quantisation]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor; a matrix when the last of its parts has come, none of which is read before."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in recipe.tensors(scratch):
        path, _, part = name.rpartition(".")
        if path not in packed or part not in ("weight", *keys.PACKED):
            yield name, tensor
            continue
        parts = waiting.setdefault(path, {})
        parts[part] = tensor
        if len(parts) == 1 + len(packed[path].parts):
            yield f"{path}.weight", _joined(waiting.pop(path), packed[path])


def _joined(parts: Mapping[str, Tensor], how: Quantisation) -> Tensor:
    weight, scales, biases = (parts.get(part) for part in ("weight", *keys.PACKED))
    if weight is None or scales is None:  # told from the scales and checked against the outlines
        raise CheckpointError("a packed matrix lacks its weight: download the model again")
    shape = (*scales.shape[:-1], scales.shape[-1] * how.group_size)

    def rows(begin: int, end: int) -> mx.array:
        return how.unpack(
            weight.rows(begin, end),
            scales.rows(begin, end),
            None if biases is None else biases.rows(begin, end),
        )

    return Tensor(mx.float32, shape, rows)


def _how(entry: Mapping[str, Any], path: str) -> Quantisation:
    own = entry.get(path)
    part = own if isinstance(own, Mapping) else entry
    return Quantisation(part["bits"], part["group_size"], part.get("mode", "affine"))


def _outline(path: str, outlines: Mapping[str, mx.array], how: Quantisation) -> mx.array:
    """Raises CheckpointError where the parts of a matrix do not fit together."""
    weight, scales = outlines[f"{path}.weight"], outlines[f"{path}.scales"]
    shape = (*scales.shape[:-1], scales.shape[-1] * how.group_size)
    fits = weight.shape == (*shape[:-1], shape[-1] * how.bits // 32) and all(
        f"{path}.{part}" in outlines for part in how.parts
    )
    if not fits:
        raise CheckpointError(f"{path} is not packed as config.json says")
    return mx.zeros(shape, dtype=mx.float32)


def _natural(scales: mx.array) -> mx.Dtype:
    return scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else mx.bfloat16
