"""Metadata and tensor list of a little-endian GGUF file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf.GGUFReader is not used: it
does not validate files, and takes 15 seconds instead of 0.3 for the vocabulary of Llama 3."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
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
class Stored:
    """A tensor in a file, and how the model reads it.

    Attributes:
        name: The name in the file.
        kind: GGUF's name of the element type.
        shape: The shape in the model, the slowest axis first. The file may leave out a first axis
            of 1.
        begin: The position of the first byte.
        row_nbytes: Bytes of a row along the last axis.
        heads: The number of rotary heads whose rows are in llama.cpp's order; 0 for other tensors.
        excess: The constant that llama.cpp's converter added to every value.
        is_matrix: Whether the model supports the tensor in quantized form.
    """

    name: str
    data: mmap.mmap
    kind: str
    shape: tuple[int, ...]
    begin: int
    row_nbytes: int
    heads: int = 0
    excess: float = 0
    is_matrix: bool = False

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.kind, self.shape, math.prod(self.shape[:-1]) * self.row_nbytes)

    @property
    def read_as(self) -> str:
        """The type of the values when they are read, a key of `tensors.ELEMENTS`."""
        return "F32" if self.kind in TYPES else self.kind

    @property
    def raw(self) -> np.ndarray[Any, Any]:
        """The bytes, uint8, shape (..., bytes of a row); a vector is one row."""
        axes = self.shape[:-1] or (1,)
        return np.ndarray((*axes, self.row_nbytes), np.uint8, self.data, self.begin)

    def rows(self, count: int | None = None) -> mx.array:
        """Return all entries along the first axis, or the first ones, dequantized."""
        if len(self.shape) > 1:
            values = self._values(self.raw[:count])
        else:  # a quantized vector is one row of blocks, and only whole rows can be dequantized
            values = self._values(self.raw)[0][:count]
        return values - self.excess if self.excess else values

    def _values(self, raw: np.ndarray[Any, Any]) -> mx.array:
        """Return the values of rows: (..., bytes of a row) -> (..., elements)."""
        if self.kind in TYPES:
            return TYPES[self.kind].dequantize(raw)
        return to_mlx(np.ascontiguousarray(raw).view(f"<{ELEMENTS[self.kind][1]}"), self.kind)


def read_header(data: mmap.mmap) -> tuple[Mapping[str, Any], dict[str, Stored]]:
    """Return the metadata, with lists of numbers as numpy arrays, and the tensors by name. Raises
    Malformed."""
    if _take(data, 4, "its first bytes") != b"GGUF":
        raise Malformed("is no GGUF file, or its beginning is damaged")
    if (version := _number(data, "I", "its version")) not in VERSIONS:
        raise Malformed(f"is of GGUF version {version}, not {VERSIONS}: convert it again")
    count, keys = _number(data, "Q", "its size"), _number(data, "Q", "its size")
    metadata = {(name := _name(data, "a key")): _value(data, name) for _ in range(keys)}
    listed = [_entry(data) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    begin = -(-data.tell() // alignment) * alignment
    tensors: dict[str, Stored] = {}
    for offset, name, number, shape in sorted(listed):
        kind, block, nbytes = _element_type(number)
        if shape[-1] % block:
            raise Malformed(f"is damaged: the rows of {name} are no whole {kind} blocks")
        stored = Stored(name, data, kind, shape, begin + offset, shape[-1] // block * nbytes)
        if stored.begin + stored.info.nbytes > len(data):
            raise Malformed(f"is truncated in {name}: download it again")
        tensors[name] = stored
    return metadata, tensors


def _value(data: mmap.mmap, key: str) -> Any:
    """Read a string, a number or a flag; a list of strings; or an array of numbers or flags."""
    kind, count = _number(data, "I", key), -1
    if kind == _ARRAY:
        kind, count = _number(data, "I", key), _number(data, "Q", key)
    if kind == _STRING:
        return _text(data, key) if count < 0 else [_text(data, key) for _ in range(count)]
    if kind not in _SCALARS:
        raise Malformed(f"is damaged: {key} is of an unknown type ({kind})")
    dtype = np.dtype(f"<{_SCALARS[kind]}")
    values = np.frombuffer(_take(data, abs(count) * dtype.itemsize, key), dtype)
    values = values.astype(np.bool_) if kind == _BOOL else values
    return values[0].item() if count < 0 else values


def _entry(data: mmap.mmap) -> tuple[int, str, int, tuple[int, ...]]:
    """Read the offset, name, ggml's type number, and shape of a tensor."""
    name = _name(data, "a tensor")
    axes = _number(data, "I", name)
    shape = tuple(_number(data, "Q", name) for _ in range(axes))[::-1]
    kind = _number(data, "I", name)
    return _number(data, "Q", name), name, kind, shape


def _name(data: mmap.mmap, what: str) -> str:
    name = _text(data, what)
    check_name(name, what)
    return name


def _text(data: mmap.mmap, what: str) -> str:
    try:
        return _take(data, _number(data, "Q", what), what).decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"is damaged: a string at {what} is not UTF-8") from None


def _number(data: mmap.mmap, form: str, what: str) -> Any:
    return struct.unpack(f"<{form}", _take(data, struct.calcsize(f"<{form}"), what))[0]


def _take(data: mmap.mmap, count: int, what: str) -> bytes:
    if count > len(data) - data.tell():
        raise Malformed(f"is truncated at {what}: download it again")
    return data.read(count)


def _element_type(number: int) -> tuple[str, int, int]:
    """Return the name of ggml's type number, and the elements and bytes of a block. Raises
    Malformed if the type is not read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise Malformed(
            f"holds ggml's type {number}, which the gguf package does not know"
        ) from None
    if kind.name in _UNQUANTIZED or kind.name in TYPES:
        return kind.name, block, nbytes
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
