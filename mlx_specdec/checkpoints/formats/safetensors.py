"""One safetensors file: its header, checked against the file before anything else is believed.

Knows the format (https://huggingface.co/docs/safetensors) and MLX's reader of it. Knows nothing of
what the tensors mean or of other files. Nothing is allocated on the word of a header alone.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, first_line
from ..disk.mapped import open_map, to_mlx
from ..disk.regular import check_path, check_regular
from .reader import Contents
from .reader import TensorInfo as TensorInfo

LONGEST_HEADER = 100_000_000
LONGEST_NAME = 1000
LARGEST_EXTENT = 2**31 - 1
DTYPES: Mapping[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    # MLX has no such type; its reader hands out the bytes, and mlx-lm's models know them.
    "F8_E4M3": mx.uint8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}
NUMPY: Mapping[str, str] = {
    "BOOL": "<u1",
    "U8": "<u1",
    "I8": "<i1",
    "F8_E4M3": "<u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
}
"""How `to_mlx` wants the bytes of each type."""


class SafetensorsFile:
    """The tensors of one file, read in pieces through a map of it. infos: as `read_header` says."""

    def __init__(self, file: Path) -> None:
        """Raises CheckpointError as `read_header` does."""
        self.paths = (file,)
        self._map: mmap.mmap | None = None
        self.infos: Mapping[str, TensorInfo] = read_header(file)
        position = file.stat().st_size - sum(info.nbytes for info in self.infos.values())
        self._places: dict[str, int] = {}
        for name, info in self.infos.items():
            self._places[name] = position
            position += info.nbytes

    @property
    def contents(self) -> Contents:
        """The same: names and types are taken as they are."""
        return Contents.plain(self.infos)

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 along the first axis; a scalar whole. Read now, copied once."""
        info = self.infos[name]
        shape = (end - begin, *info.shape[1:]) if info.shape else ()
        if not math.prod(shape):
            return to_mlx(np.empty(shape, NUMPY[info.dtype]), info.dtype)
        if self._map is None:
            self._map = open_map(self.paths[0])
        row = info.nbytes // info.extent
        place = self._places[name] + begin * row
        return to_mlx(np.ndarray(shape, NUMPY[info.dtype], self._map, place), info.dtype)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """One file's tensors by name, in the order of their bytes.

    Raises CheckpointError for a file that is truncated, whose header lies about its size or its
    tensors, repeats a name, or asks for a type that MLX does not read.
    """
    header, room = _header(file)
    spans: list[tuple[int, int, str, TensorInfo]] = []
    for name, entry in header.items():
        if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise CheckpointError(f"{file} is damaged: a tensor is called {_short(name)}")
        if name != "__metadata__":
            spans.append(_span(file, name, entry))
    spans.sort(key=lambda span: span[:2])
    position = 0
    for begin, end, name, _ in spans:
        if end > room:
            raise CheckpointError(f"{file} is truncated in {name}: download it again")
        if begin != position:
            raise CheckpointError(f"{file} is damaged: {name} does not follow the tensor before it")
        position = end
    if position != room:
        raise CheckpointError(f"{file} is damaged: {room - position} bytes belong to no tensor")
    return {name: info for _, _, name, info in spans}


def load(file: Path) -> dict[str, mx.array]:
    """One file's tensors, lazily: bytes are read when an array is evaluated.

    Raises CheckpointError where MLX cannot read the file.
    """
    check_path(file)
    try:
        return dict(mx.load(str(file)))  # type: ignore[arg-type]
    except RuntimeError as problem:
        reason = first_line(problem)
        raise CheckpointError(f"{file} cannot be read: {reason}") from problem


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The parsed header, and how many bytes of tensors follow it."""
    check_regular(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise CheckpointError(
                    f"{file} is truncated or no safetensors file: download it again"
                )
            text = stream.read(length)
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except _Repeated as problem:
        raise CheckpointError(
            f"{file} is damaged: its header repeats {_short(problem.args[0])}"
        ) from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header: download it again")
    return header, size - 8 - length


def _span(file: Path, name: str, entry: Any) -> tuple[int, int, str, TensorInfo]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file} has a damaged header at {name}: download it again") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{file} stores {name} as {_short(dtype)}, which MLX does not read; it reads {known}"
        )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{file} has a damaged header at {name}: download it again")
    if any(extent > LARGEST_EXTENT for extent in shape):
        raise CheckpointError(f"{file} is damaged: {name} claims the shape {_short(tuple(shape))}")
    nbytes = math.prod(shape) * DTYPES[dtype].size
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file} is damaged: {name} has {end - begin} bytes where {dtype} of shape "
            f"{_short(tuple(shape))} needs {nbytes}"
        )
    return begin, end, name, TensorInfo(dtype, tuple(shape), nbytes)


class _Repeated(Exception):
    """A name that occurs twice in one JSON object."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Repeated(name)
        found[name] = value
    return found


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
