"""A llama2.c file as a set of tensors under Hugging Face's names.

Knows its three versions (https://github.com/karpathy/llama2.c): the legacy one without a magic
number, 1 in float32 with a header of 256 bytes, 2 with matrices in eight bits. A file has no list
of its tensors: where each lies follows from seven numbers, and these are believed only where they
add up to the very size of the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError
from ...account import Contents
from ...disk.mapped import open_map, to_mlx
from ..safetensors import TensorInfo
from .layout import Absurd, Entry, Sizes, configuration, entries, rotary_rows

MAGIC = struct.pack("<I", 0x616B3432)
HEADER_BYTES = 256
VERSIONS = (1, 2)
_NUMBERS = struct.Struct("<7i")
_EPSILON, _THETA = 1e-5, 10000.0
"""llama2.c has them in its code, not in its files."""
_ORDERS = {
    0: (
        "tok_embeddings",
        "attention_norm",
        *(f"attention.w{letter}" for letter in "qkvo"),
        "ffn_norm",
        *(f"feed_forward.w{number}" for number in "123"),
        "norm",
        "frequencies",
        "output",
    ),
    1: (
        "attention_norm",
        "ffn_norm",
        "norm",
        "tok_embeddings",
        *(f"attention.w{letter}" for letter in "qkvo"),
        *(f"feed_forward.w{number}" for number in "123"),
        "output",
    ),
}
"""What lies after what, each through all layers; version 2 has that of version 1."""


@dataclass(frozen=True)
class _Header:
    """group: weights that share a scale in version 2, 0 in the others. tied: the output head is the
    embedding. begin: where the tensors start."""

    version: int
    sizes: Sizes
    length: int
    tied: bool
    group: int
    begin: int


@dataclass(frozen=True)
class _Place:
    """begin: of a tensor's values. scales: where its scales begin, None where it is float32."""

    entry: Entry
    begin: int
    scales: int | None = None


class Llama2cFile:
    """The tensors of one file, which is mapped.

    infos: type and shape of every tensor, eight-bit ones as the float32 that they stand for.
    config: what config.json would say. packed: names of the types that are expanded.
    """

    def __init__(self, file: Path) -> None:
        """Raises CheckpointError for a file of another kind, damaged, truncated, or longer than
        what its header says."""
        self._data = open_map(file)
        try:
            self._header = _read_header(self._data)
            self._places = _places(self._header, self._data)
        except Absurd as problem:
            raise CheckpointError(f"{file} is no llama2.c file, or damaged: it {problem}") from None
        except _Damaged as problem:
            raise CheckpointError(f"{file} {problem}") from None
        header = self._header
        self.packed = ["Q8_0"] if header.group else []
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo("F32", place.entry.shape, 4 * math.prod(place.entry.shape))
            for name, place in self._places.items()
        }
        self.config: Mapping[str, Any] = configuration(
            header.sizes,
            stored="F32",
            epsilon=_EPSILON,
            theta=_THETA,
            length=header.length,
            tied=header.tied,
        )

    @property
    def contents(self) -> Contents:
        """What the file holds; it has no names, these are Meta's."""
        return Contents(
            {
                place.entry.theirs: TensorInfo(
                    "F32" if place.scales is None else "Q8_0",
                    place.entry.shape,
                    sum(_nbytes(self._header, place.entry)),
                )
                for place in self._places.values()
            },
            {ours: place.entry.theirs for ours, place in self._places.items()},
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 along the first axis; read now, copied once."""
        place = self._places[name]
        if not place.entry.heads:
            return to_mlx(self._read(place, begin, end), "F32")
        width = place.entry.shape[0] // place.entry.heads
        first, last = begin // width * width, -(-end // width) * width
        near = self._read(place, first, last)
        return to_mlx(near[rotary_rows(begin, end, width) - first], "F32")

    def _read(self, place: _Place, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Rows in the file's own order."""
        shape = (end - begin, *place.entry.shape[1:])
        row = math.prod(shape[1:])
        if place.scales is None:
            return np.ndarray(shape, "<f4", self._data, place.begin + 4 * begin * row)
        group = self._header.group
        values = np.ndarray(shape, "i1", self._data, place.begin + begin * row)
        first, last = begin * row // group, -(-end * row // group)
        scales: np.ndarray[Any, Any] = np.ndarray(
            (last - first,), "<f4", self._data, place.scales + 4 * first
        )
        skipped = begin * row - first * group
        # Groups run through the rows of a tensor, and need not end where a row does.
        each = np.repeat(scales, group)[skipped : skipped + values.size]
        with np.errstate(over="ignore"):  # whoever wants weights refuses what is not finite
            return values.astype(np.float32) * each.reshape(shape)


def is_llama2c(file: Path) -> bool:
    """Whether a file has the magic number of version 1 or later, or has the very size that the
    numbers of a legacy header ask for."""
    try:
        if not file.is_file() or file.stat().st_size < _NUMBERS.size:
            return False
        with file.open("rb") as stream:
            start = stream.read(_NUMBERS.size)
    except OSError:
        return False
    if start[:4] == MAGIC:
        return True
    try:
        return _end(_legacy(start)) == file.stat().st_size
    except (Absurd, _Damaged):
        return False


class _Damaged(Exception):
    """What is wrong with a file; the text follows its name."""


def _read_header(data: mmap.mmap) -> _Header:
    if data[:4] != MAGIC:
        if len(data) < _NUMBERS.size:
            raise _Damaged("is truncated or no llama2.c file: download it again")
        return _legacy(data[: _NUMBERS.size])
    if len(data) < HEADER_BYTES:
        raise _Damaged("is truncated: download it again")
    (version,) = struct.unpack_from("<i", data, 4)
    if version not in VERSIONS:
        raise _Damaged(f"is of version {version} of llama2.c's format; 0, 1 and 2 are read")
    numbers = _NUMBERS.unpack_from(data, 8)
    tied, group = struct.unpack_from("<Bi", data, 36)
    header = _header(version, numbers, tied=bool(tied), begin=HEADER_BYTES)
    if version == 1:
        return header
    if not 1 <= group <= header.sizes.width:
        raise _Damaged(f"is damaged: it asks for groups of {group}")
    return replace(header, group=group)


def _legacy(start: bytes) -> _Header:
    numbers = _NUMBERS.unpack(start)
    # A negative vocabulary says that the head is stored.
    whole = (*numbers[:5], abs(numbers[5]), numbers[6])
    return _header(0, whole, tied=numbers[5] > 0, begin=_NUMBERS.size)


def _header(version: int, numbers: tuple[int, ...], *, tied: bool, begin: int) -> _Header:
    width, inner, layers, heads, kv_heads, vocabulary, length = numbers
    if heads < 1 or width % heads or length < 1:
        raise Absurd(f"asks for {heads} heads in a width of {width} and for {length} positions")
    sizes = Sizes(width, inner, layers, heads, kv_heads, width // heads, vocabulary)
    sizes.check()
    return _Header(version, sizes, length, tied, 0, begin)


def _runs(header: _Header) -> Iterator[tuple[list[tuple[str, Entry]], int]]:
    """What lies in the file, in its order: tensors one after the other, then bytes to pass over."""
    by_part: dict[str, list[tuple[str, Entry]]] = {}
    # One layer stands for all until the sizes are believed, see `_end`.
    for ours, entry in entries(header.sizes).items():
        part = entry.theirs.removesuffix(".weight")
        if part.startswith("layers."):
            part = part.split(".", 2)[2]
        by_part.setdefault(part, []).append((ours, entry))
    for part in _ORDERS[min(header.version, 1)]:
        if part == "frequencies":
            yield [], 4 * header.length * header.sizes.head_width
        elif part != "output" or not header.tied:
            yield by_part[part], 0


def _end(header: _Header) -> int:
    """How long the file has to be."""
    one = replace(header, sizes=replace(header.sizes, layers=1))
    total = header.begin
    for run, passed in _runs(one):
        total += passed
        for _, entry in run:
            times = header.sizes.layers if entry.theirs.startswith("layers.") else 1
            total += times * sum(_nbytes(header, entry))
    return total


def _nbytes(header: _Header, entry: Entry) -> tuple[int, int]:
    """Bytes of a tensor's values and of its scales."""
    size = math.prod(entry.shape)
    if not header.group or len(entry.shape) == 1:
        return 4 * size, 0
    if size % header.group:
        raise _Damaged(f"is damaged: {entry.theirs} does not divide into groups of {header.group}")
    return size, 4 * (size // header.group)


def _places(header: _Header, data: mmap.mmap) -> dict[str, _Place]:
    """Where each tensor lies. Raises _Damaged where the file is not as long as it has to be."""
    needed = _end(header)
    if len(data) != needed:
        what = "truncated" if len(data) < needed else "damaged"
        raise _Damaged(
            f"is {what} or no llama2.c file: its header asks for {needed} bytes and it has "
            f"{len(data)}"
        )
    apart = _place(header, scales_apart=False)
    if header.group and not _sound(header, apart, data):
        apart = _place(header, scales_apart=True)
        if not _sound(header, apart, data):
            raise _Damaged("is damaged: its scales are no positive numbers")
    return apart


def _place(header: _Header, *, scales_apart: bool) -> dict[str, _Place]:
    """scales_apart: all scales lie behind all values, as one release of llama2.c wrote them,
    instead of each tensor's behind its own."""
    found: dict[str, _Place] = {}
    position = header.begin
    late: list[str] = []
    for run, passed in _runs(header):
        for ours, entry in run:
            values, scales = _nbytes(header, entry)
            behind = position + values if scales else None
            found[ours] = _Place(entry, position, behind)
            late += [ours] if scales else []
            position += values + (0 if scales_apart else scales)
        position += passed
    for ours in late if scales_apart else []:
        found[ours] = replace(found[ours], scales=position)
        position += _nbytes(header, found[ours].entry)[1]
    return found


def _sound(header: _Header, places: Mapping[str, _Place], data: mmap.mmap) -> bool:
    """Whether all scales can be scales: eight-bit values read as numbers have either sign."""
    for place in places.values():
        if place.scales is not None:
            count = math.prod(place.entry.shape) // header.group
            scales: np.ndarray[Any, Any] = np.ndarray((count,), "<f4", data, place.scales)
            if not (np.isfinite(scales) & ~np.signbit(scales)).all():
                return False
    return True
