"""Metadata and tensor list of a little-endian GGUF file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf.GGUFReader is not used: it
does not validate files, and takes 15 seconds instead of 0.3 for the vocabulary of Llama 3."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..tensors import ELEMENTS, Malformed, TensorInfo, check_name, to_mlx
from .gguf_blocks import TYPES

VERSIONS = (2, 3)
ALIGNMENT = 32
"""Default alignment of tensors in bytes."""
_ARRAY, _STRING, _BOOL = 9, 8, 7
_SCALARS = {**dict(enumerate("BbHhIifB")), 10: "Q", 11: "q", 12: "d"}
_UNQUANTIZED = ("F32", "F16", "BF16", "I64", "I32", "I16", "I8")
"""Names of element types that are not quantized."""


@dataclass(frozen=True)
class GgufType:
    """An element type of GGUF. A row is a whole number of blocks.

    Attributes:
        block, nbytes: Elements and bytes of a block.
        stored: The type of the values when read, a key of `tensors.ELEMENTS`.
        numpy: The numpy type, "" for quantized types.
    """

    name: str
    block: int
    nbytes: int
    stored: str
    numpy: str


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. The slowest axis is first in its shape. begin: The position of the first
    byte. row_nbytes: Bytes of a row along the last axis."""

    data: mmap.mmap | bytes
    kind: GgufType
    shape: tuple[int, ...]
    begin: int
    row_nbytes: int

    @property
    def info(self) -> TensorInfo:
        nbytes = math.prod(self.shape[:-1]) * self.row_nbytes
        return TensorInfo(self.kind.name, self.shape, nbytes)

    @property
    def raw(self) -> np.ndarray[Any, Any]:
        """The bytes, uint8, shape (..., bytes of a row); a vector is one row."""
        axes = self.shape[:-1] or (1,)
        return np.ndarray((*axes, self.row_nbytes), np.uint8, self.data, self.begin)

    def rows(self, chosen: slice | np.ndarray[Any, Any]) -> mx.array:
        """Return entries along the first axis, dequantized."""
        if len(self.shape) > 1:
            return self._values(self.raw[chosen])
        # A quantized vector is one row of blocks, and only whole rows can be dequantized.
        values = self._values(self.raw)[0]
        return values[chosen if isinstance(chosen, slice) else mx.array(chosen)]

    def _values(self, raw: np.ndarray[Any, Any]) -> mx.array:
        """Return the values of rows: (..., bytes of a row) -> (..., elements)."""
        if self.kind.numpy:
            raw = np.ascontiguousarray(raw)
            return to_mlx(raw.view(f"<{self.kind.numpy}"), self.kind.stored)
        return TYPES[self.kind.name].dequantize(raw)


def read_header(data: mmap.mmap | bytes) -> tuple[Mapping[str, Any], dict[str, Stored]]:
    """Return the metadata, with lists of numbers as numpy arrays, and the tensors by name. Raises
    Malformed."""
    reader = _Reader(data)
    if reader.take(4, "its first bytes") != b"GGUF":
        raise Malformed("is no GGUF file, or its beginning is damaged")
    if (version := reader.number("I", "its version")) not in VERSIONS:
        raise Malformed(f"is of GGUF version {version}, not {VERSIONS}: convert it again")
    count, keys = reader.number("Q", "its size"), reader.number("Q", "its size")
    metadata = {(name := reader.name("a key")): reader.value(name) for _ in range(keys)}
    listed = [reader.entry() for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    begin = -(-reader.position // alignment) * alignment
    tensors: dict[str, Stored] = {}
    for offset, name, number, shape in sorted(listed):
        kind = element_type(number)
        if shape[-1] % kind.block:
            raise Malformed(f"is damaged: the rows of {name} are no whole {kind.name} blocks")
        row_nbytes = shape[-1] // kind.block * kind.nbytes
        stored = Stored(data, kind, shape, begin + offset, row_nbytes)
        if stored.begin + stored.info.nbytes > len(data):
            raise Malformed(f"is truncated in {name}: download it again")
        tensors[name] = stored
    return metadata, tensors


class _Reader:
    """A position in the file. Methods read a value there and advance the position."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data, self.position = data, 0

    def name(self, what: str) -> str:
        name = self.text(what)
        check_name(name, what)
        return name

    def value(self, key: str) -> Any:
        """Read a string, a number or a flag; a list of strings; or an array of numbers or flags."""
        kind, count = self.number("I", key), -1
        if kind == _ARRAY:
            kind, count = self.number("I", key), self.number("Q", key)
        if kind == _STRING:
            return self.text(key) if count < 0 else [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise Malformed(f"is damaged: {key} is of an unknown type ({kind})")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        values = np.frombuffer(self.take(abs(count) * dtype.itemsize, key), dtype)
        values = values.astype(np.bool_) if kind == _BOOL else values
        return values[0].item() if count < 0 else values

    def entry(self) -> tuple[int, str, int, tuple[int, ...]]:
        """Read the offset, name, ggml's type number, and shape of a tensor."""
        name = self.name("a tensor")
        axes = self.number("I", name)
        shape = tuple(self.number("Q", name) for _ in range(axes))[::-1]
        kind = self.number("I", name)
        return self.number("Q", name), name, kind, shape

    def text(self, what: str) -> str:
        try:
            return self.take(self.number("Q", what), what).decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"is damaged: a string at {what} is not UTF-8") from None

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise Malformed(f"is truncated at {what}: download it again")
        taken = self._data[self.position : end]
        self.position = end
        return taken


@cache
def element_type(number: int) -> GgufType:
    """Return the type with ggml's number. Raises Malformed if it is not read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise Malformed(
            f"holds ggml's type {number}, which the gguf package does not know"
        ) from None
    if kind.name in _UNQUANTIZED:
        return GgufType(kind.name, block, nbytes, kind.name, ELEMENTS[kind.name][1])
    if kind.name in TYPES:
        return GgufType(kind.name, block, nbytes, "F32", "")
    raise Malformed(
        f"holds {kind.name}, which is not read: take a file of the types {', '.join(TYPES)}, or a "
        "mixture of them such as Q4_K_M"
    )


class Metadata:
    """The metadata of a file. architecture: llama.cpp's name. Raises Malformed without one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture = self.get("general.architecture", str)

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value or the default. A key that begins with a dot gets the architecture as its
        prefix. Raises Malformed for a missing value or a wrong type."""
        key = self._full(key)
        value = self._values.get(key, default)
        if value is None:
            raise Malformed(f"has no {key} in its metadata: it does not describe a model")
        # Some writers store a number per layer. Equal numbers are read as a single one.
        if isinstance(value, np.ndarray) and kind is not np.ndarray and len({*value.tolist()}) == 1:
            value = value[0].item()
        if type(value) is not kind and (kind, type(value)) != (float, int):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            raise Malformed(f"has {value!r:.40} for {key:.100} instead of {kind.__name__}")
        return float(value) if kind is float else value

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key
