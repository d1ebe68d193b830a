"""Bytes of a file -> MLX arrays, through a memory map: nothing is read that nobody asks for."""

from __future__ import annotations

import mmap
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from .regular import check_regular


def open_map(file: Path) -> mmap.mmap:
    """A read-only map of a whole file. Raises CheckpointError, also for an empty file."""
    check_regular(file)
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    except ValueError:
        raise CheckpointError(f"{file} is empty: download it again") from None


def to_mlx(values: np.ndarray, stored: str) -> mx.array:
    """A copy of `values` as MLX has the type `stored`, a key of `reader.ELEMENTS`.

    values: in the machine's or the other byte order, with any strides; of integers that have the
    bits where numpy lacks the type.
    """
    native = np.asarray(values, values.dtype.newbyteorder("="), order="C")
    if stored == "BOOL":
        return mx.array(native.astype(np.bool_))
    if stored == "F32":
        # Too large for float32, or no number: whoever wants weights refuses it.
        with np.errstate(over="ignore", invalid="ignore"):
            return mx.array(native.astype(np.float32, copy=False))
    array = mx.array(native)
    return array.view(mx.bfloat16) if stored == "BF16" else array
