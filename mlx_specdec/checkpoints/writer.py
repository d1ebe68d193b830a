"""Tensors -> safetensors shards with an index, as mlx-lm writes them; and config.json.

Knows types, quantisation and file layout. Knows nothing of models or of where the result will lie.
Memory holds one tensor at a time: a shard's header follows from lazy arrays, whose types and shapes
are known before they are computed; then each is computed, written at its offset and dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import CheckpointError
from .files import INDEX
from .safetensors_file import DTYPES

SHARD_BYTES = 5 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F8_E4M3"}


@dataclass(frozen=True)
class Quantisation:
    """How one matrix is packed: bits per weight, and weights that share a scale and a bias."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor. dtype None: as it is; quantisation: of a matrix, after that."""

    dtype: mx.Dtype | None = None
    quantisation: Quantisation | None = None


@dataclass(frozen=True)
class Written:
    """What was written. parameters: weights counted before packing, scales not counted."""

    tensors: int
    parameters: int
    nbytes: int


@dataclass
class _Item:
    """One source tensor and the lazy arrays that are stored for it."""

    name: str
    source: mx.array
    stored: dict[str, mx.array]
    cast: mx.array


@dataclass
class _Shard:
    items: list[_Item] = field(default_factory=list)
    nbytes: int = 0


def write_weights(
    directory: Path,
    tensors: Iterable[tuple[str, mx.array]],
    change: Callable[[str, mx.array], Change],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Written:
    """Write model.safetensors, or model-0000i-of-0000n.safetensors, and the index.

    tensors: lazy, by name. shard_bytes: the most bytes of tensors in one file, unless a single
    tensor has more. progress: called with the source bytes of each tensor done. Raises
    CheckpointError for values that are not finite, or not after the change of type; OSError as the
    system raises it.
    """
    parts: list[dict[str, mx.array] | list[str]] = []
    shard, names, parameters, total = _Shard(), [], 0, 0
    for name, array in tensors:
        item = _prepare(name, array, change(name, array))
        nbytes = sum(each.nbytes for each in item.stored.values())
        if shard.items and shard.nbytes + nbytes > shard_bytes:
            parts.append(_write_shard(directory, len(parts), shard, progress))
            shard = _Shard()
        shard.items.append(item)
        shard.nbytes += nbytes
        total += nbytes
        parameters += array.size
        names += item.stored
        del item, array
    if shard.items:
        parts.append(_write_shard(directory, len(parts), shard, progress))
    _write_index(directory, parts, total, parameters)
    return Written(tensors=len(names), parameters=parameters, nbytes=total)
