"""One safetensors file (https://huggingface.co/docs/safetensors): its header, checked against the
file before anything else is believed."""

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
from ..disk import open_map, reading
from ..tensors import (
    DTYPES,
    ELEMENTS,
    LARGEST_EXTENT,
    Malformed,
    Reader,
    TensorInfo,
    check_name,
    naming,
    shortened,
    to_mlx,
)

LONGEST_HEADER = 100_000_000


class SafetensorsFile(Reader):
    """The tensors of one file, read in pieces through a map of it."""

    def __init__(self, file: Path) -> None:
        self.paths = (file,)
        self._map: mmap.mmap | None = None
        self.infos = read_header(file)
        position = file.stat().st_size - sum(info.nbytes for info in self.infos.values())
        self._places: dict[str, int] = {}
        for name, info in self.infos.items():
            self._places[name] = position
            position += info.nbytes

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        info = self.infos[name]
        if self._map is None:
            self._map = open_map(self.paths[0])
        shape = (end - begin, *info.shape[1:]) if info.shape else ()
        place = self._places[name] + begin * (info.nbytes // max(1, info.extent))
        values = np.ndarray(shape, f"<{ELEMENTS[info.dtype][1]}", self._map, place)
        return to_mlx(values, info.dtype)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """One file's tensors by name, in the order of their bytes. Raises CheckpointError for a file
    that is truncated or damaged, or asks for a type that MLX does not read."""
    with naming(file), reading(file):
        header, room = _header(file)
        for name in header:
            check_name(name)
        header.pop("__metadata__", None)
        spans = [_span(name, entry) for name, entry in header.items()]
        spans.sort(key=lambda span: span[:2])
        position = 0
        for begin, end, name, _ in spans:
            if end > room:
                raise Malformed(f"is truncated in {name}: download it again")
            if begin != position:
                raise Malformed(f"is damaged: {name} does not follow the tensor before it")
            position = end
        if position != room:
            raise Malformed(f"is damaged: {room - position} bytes belong to no tensor")
    return {name: info for _, _, name, info in spans}


def of_mlx(file: Path) -> bool:
    """Return whether a file says that an MLX program wrote it. Raises CheckpointError."""
    with naming(file), reading(file):
        said = _header(file)[0].get("__metadata__")
    return isinstance(said, dict) and said.get("format") == "mlx"


def write_outline(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """A file of a header and the size of such tensors, the rest of which is a hole of zeros."""
    position, entries = 0, {}
    for name, info in tensors.items():
        end = position + info.nbytes
        entries[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = json.dumps(entries).encode()
    with file.open("xb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + position)


def load(file: Path) -> dict[str, mx.array]:
    """One file's tensors, lazily: bytes are read when an array is evaluated. Raises
    CheckpointError."""
    try:
        str(file).encode("utf-8")
        return dict(mx.load(str(file)))  # type: ignore[arg-type]
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{file} cannot be opened by MLX, which takes paths in UTF-8 alone: rename it"
        ) from None
    except RuntimeError as problem:
        raise CheckpointError(f"{file} cannot be read: {first_line(problem)}") from problem


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The parsed header, and how many bytes of tensors follow it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise Malformed("is truncated or no safetensors file: download it again")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise Malformed("has a damaged header: download it again")
    return header, size - 8 - length


def _span(name: str, entry: Any) -> tuple[int, int, str, TensorInfo]:
    """The beginning and end of one tensor, its name, and its type and shape."""
    damaged = Malformed(f"has a damaged header at {name}: download it again")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise Malformed(
            f"stores {name} as {shortened(dtype)}, which MLX does not read; it reads {known}"
        )
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise damaged
    if any(extent > LARGEST_EXTENT for extent in shape):
        raise Malformed(f"is damaged: {name} claims the shape {shortened(shape)}")
    if end - begin != (nbytes := math.prod(shape) * DTYPES[dtype].size):
        raise Malformed(
            f"is damaged: {name} has {end - begin} bytes where {dtype} of shape "
            f"{shortened(shape)} needs {nbytes}"
        )
    return begin, end, name, TensorInfo(dtype, shape, nbytes)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise Malformed(f"is damaged: its header repeats {shortened(name)}")
        entries[name] = value
    return entries
