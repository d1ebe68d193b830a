"""The front of a GGUF file: its metadata and its list of tensors, held to the file's size.

The container is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3 in
either byte order. No count, length or shape is believed before the file is known to be long enough
for it. (The gguf package's own reader believes them: hence this one.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...tensors import LARGEST_EXTENT, Malformed, check_name

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
