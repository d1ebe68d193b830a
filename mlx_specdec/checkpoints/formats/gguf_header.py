"""The front of a GGUF file: its metadata and its list of tensors, held to the file's size.

The container is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3 in
either byte order. No count, length or shape is believed before the file is known to be long enough
for it. (The gguf package's own reader believes them: hence this one.)
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from ..tensors import LARGEST_EXTENT, Malformed, check_name, to_mlx

VERSIONS = (2, 3)
ALIGNMENT = 32
LONGEST_STRING = 1 << 24
"""Bytes; chat templates and lists of merges are the longest that are known, below 1 MB."""
LONGEST_ARRAY = 1 << 22
"""Entries; the largest vocabularies have 0.3 M tokens and 0.6 M merges."""
MOST_AXES = 4
_ARRAY, _STRING, _BOOL = 9, 8, 7
_SCALARS = {**dict(enumerate("BbHhIifB")), 10: "Q", 11: "q", 12: "d"}
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class Entry:
    """One tensor as the file lists it. type: ggml's number of the element type. shape: slowest axis
    first, as everywhere else here. offset: from the beginning of the tensors' bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """metadata: numbers, booleans, strings, and lists of them (of numbers as numpy arrays).
    begin: where the tensors' bytes begin."""

    metadata: Mapping[str, Any]
    entries: tuple[Entry, ...]
    begin: int
    big_endian: bool


def read_header(data: mmap.mmap | bytes) -> Header:
    """All that comes before the tensors, of which only the list is held to be plausible. Raises
    Malformed."""
    reader = _Reader(data)
    tensors, keys = reader.begin()
    metadata: dict[str, Any] = {}
    reader.check_count(keys, _SMALLEST_KEY, "keys")
    for _ in range(keys):
        name = reader.name("a key")
        if name in metadata:
            raise Malformed(f"is damaged: it repeats the key {name}")
        metadata[name] = reader.value(name)
    reader.check_count(tensors, _SMALLEST_TENSOR, "tensors")
    entries: dict[str, Entry] = {}
    for _ in range(tensors):
        entry = reader.entry()
        if entry.name in entries:
            raise Malformed(f"is damaged: it repeats the tensor {entry.name}")
        entries[entry.name] = entry
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise Malformed(f"is damaged: its tensors are aligned to {alignment!r:.40}")
    for entry in entries.values():
        if entry.offset % alignment:
            raise Malformed(f"is damaged: {entry.name} does not begin where tensors may")
    begin = -(-reader.position // alignment) * alignment
    return Header(metadata, tuple(entries.values()), begin, reader.order == ">")


class _Reader:
    """A position in the file, which moves over what is read and never past the end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.position = 0
        self.order = "<"

    def begin(self) -> tuple[int, int]:
        """Magic and version; the number of tensors and of keys."""
        if self._take(4, "its first bytes") != b"GGUF":
            raise Malformed("is no GGUF file, or its beginning is damaged")
        version = self._number("I", "its version")
        if version & 0xFFFF == 0:
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            raise Malformed(
                f"is of GGUF version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are "
                "read: convert it with a newer llama.cpp"
            )
        return self._number("Q", "its counts"), self._number("Q", "its counts")

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Whether the rest of the file could hold `count` things of at least `smallest` bytes."""
        if count * smallest > len(self._data) - self.position:
            raise Malformed(
                f"is truncated or damaged: it claims {count} {what}, more than fit in it"
            )

    def name(self, what: str) -> str:
        name = self._string(what)
        check_name(name, what)
        return name

    def value(self, key: str) -> Any:
        """One value of the metadata, with its type before it."""
        kind = self._number("I", key)
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(key)
        if kind not in _SCALARS:
            raise Malformed(f"is damaged: {key} is of an unknown type ({kind})")
        number = self._number(_SCALARS[kind], key)
        return bool(number) if kind == _BOOL else number

    def entry(self) -> Entry:
        name = self.name("a tensor")
        axes = self._number("I", name)
        if not 1 <= axes <= MOST_AXES:
            raise Malformed(f"is damaged: {name} has {axes} axes")
        shape = tuple(self._number("Q", name) for _ in range(axes))[::-1]
        if max(shape) > LARGEST_EXTENT:
            raise Malformed(f"is damaged: {name} claims the shape {shape!s:.80}")
        return Entry(name, self._number("I", name), shape, self._number("Q", name))

    def _array(self, key: str) -> Any:
        kind, count = self._number("I", key), self._number("Q", key)
        if count > LONGEST_ARRAY:
            raise Malformed(f"is refused: {key} claims {count} entries")
        if kind == _STRING:
            self.check_count(count, 8, f"entries of {key}")
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise Malformed(f"is refused: {key} is a list of a type ({kind}) that is not read here")
        dtype = np.dtype(self.order + _SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
        return values.astype(np.bool_) if kind == _BOOL else values

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        if length > LONGEST_STRING:
            raise Malformed(f"is truncated or damaged: a string at {what} claims {length} bytes")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"is damaged: a string at {what} is not UTF-8") from None

    def _number(self, form: str, what: str) -> Any:
        form = self.order + form
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise Malformed(f"is truncated at {what}: download it again")
        taken = self._data[self.position : end]
        self.position = end
        return taken


_PLAIN = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": "u2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
}
"""Types that are not quantized -> how numpy reads their bytes, whatever the byte order."""


@dataclass(frozen=True)
class ElementType:
    """One type. A row is a whole number of blocks of `block` elements in `nbytes` bytes.

    stored: what its values become, a key of `tensors.ELEMENTS`. numpy: "" for quantized types.
    """

    kind: Any
    block: int
    nbytes: int

    @property
    def name(self) -> str:
        return str(self.kind.name)

    @property
    def numpy(self) -> str:
        return _PLAIN.get(self.name, "")

    @property
    def stored(self) -> str:
        return self.name if self.numpy and self.name != "F64" else "F32"


@cache
def element_type(number: int) -> ElementType:
    """A type by ggml's number. Raises Malformed, with its name, for one that cannot be expanded."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        known = ElementType(kind, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise Malformed(
            f"holds tensors of ggml's type {number}, which the gguf package does not know"
        ) from None
    try:
        expand(np.zeros((1, known.nbytes), np.uint8), known, False)
    except NotImplementedError:
        raise Malformed(f"holds {known.name}, which the gguf package cannot expand") from None
    return known


def expand(raw: np.ndarray[Any, Any], kind: ElementType, big_endian: bool) -> mx.array:
    """Rows of bytes, shape (..., bytes of a row), -> their values, shape (..., elements)."""
    raw = np.ascontiguousarray(raw)
    if kind.numpy:
        return to_mlx(raw.view((">" if big_endian else "<") + kind.numpy), kind.stored)
    from gguf.quants import dequantize

    # What overflows is not finite, and whoever wants weights refuses that.
    with np.errstate(all="ignore"):
        return mx.array(dequantize(raw, kind.kind))


MOST_LAYERS = 1000
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Kind(Generic[Value]):
    """What a value has to be, in words; whether one is that, and what is made of it."""

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Value]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


COUNT = Kind("one whole number", lambda v: type(v) is int and 0 <= v <= LARGEST_EXTENT, int)
NUMBER = Kind("a number", _is_number, float)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0, float)
FLAG = Kind("true or false", lambda value: type(value) is bool, bool)
TEXT = Kind("a text", lambda value: type(value) is str, str)
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list), list[str])
NUMBERS = Kind("a list of numbers", lambda value: isinstance(value, np.ndarray), np.asarray)


class Metadata:
    """What one file says of itself. `architecture`: as llama.cpp calls it, for example "llama"."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises Malformed where there is no architecture."""
        self._values = values
        self.architecture = self.get("general.architecture", TEXT)

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def get(self, key: str, kind: Kind[Value], default: Value | None = None) -> Value:
        """A value, which has to be there unless there is a default. key: one that begins with a dot
        belongs to the architecture. Raises Malformed."""
        key = self._full(key)
        value = self._values.get(key, default)
        if value is None:
            raise Malformed(f"has no {key} in its metadata: it does not describe a model")
        # Some writers store one number per layer; where all are the same they are one number.
        if isinstance(value, np.ndarray) and kind is not NUMBERS and len({*value.tolist()}) == 1:
            value = value[0].item()
        if not kind.fits(value):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            raise Malformed(f"has {value!r:.40} for {key:.100}, which has to be {kind.words}")
        return kind.read(value)

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key


@dataclass(frozen=True)
class Place:
    """One tensor. name: in the file. shape: what it is to have; the file may leave out a first axis
    of 1. heads: its rows are those of so many rotary heads, in llama.cpp's order; 0 where they are
    in their own. excess: what llama.cpp's converter added to every value."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    excess: float = 0


@dataclass
class Finder:
    """Collects places while an architecture is described; each tensor has to be as expected.

    entries: the file's tensors by name. read: gives at most so many first rows of one, float32.
    """

    entries: Mapping[str, Entry]
    read: Callable[[str, int], np.ndarray[Any, Any]]
    places: dict[str, Place] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor. Raises Malformed where it is not there."""
        if name not in self.entries:
            raise Malformed(f"lacks the tensor {name}: download it again")
        return self.entries[name].shape

    def take(self, ours: str, place: Place) -> None:
        """Raises Malformed where the tensor is not there, or has another shape."""
        shape, wanted = self.shape(place.name), place.shape
        if shape != wanted and (1, *shape) != wanted:
            raise Malformed(
                f"is damaged: {place.name} has shape {shape} where its metadata asks for {wanted}"
            )
        self.places[ours] = place

    def check_layers(self, layers: int) -> int:
        """The same number. Raises Malformed where no model has so many layers."""
        count = len(self.entries)
        if not 1 <= layers <= min(count, MOST_LAYERS):
            raise Malformed(f"is damaged: it claims {layers} layers and has {count} tensors")
        return layers

    @property
    def left(self) -> set[str]:
        """Names of the tensors that nobody took."""
        return self.entries.keys() - {place.name for place in self.places.values()}

    def check_left(self, model_type: str, *known: str) -> None:
        """Raises Malformed for a tensor that nobody took and that is not left out on purpose."""
        if extra := self.left - {*known}:
            raise Malformed(f"holds {min(extra)}, which a {model_type} model does not have here")


def tensor_names(architecture: str, layers: int) -> Callable[[str], str]:
    """What llama.cpp calls a tensor, by Hugging Face's name. Raises Malformed."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if architecture not in numbers:
        raise Malformed(f"holds {architecture} weights, which the gguf package is too old for")
    names = get_tensor_name_map(numbers[architecture], layers)

    def theirs(ours: str) -> str:
        name = names.get_name(ours, (".weight", ".bias"))
        if name is None:
            raise Malformed(f"cannot hold {ours}, which the model needs")
        return name

    return theirs
