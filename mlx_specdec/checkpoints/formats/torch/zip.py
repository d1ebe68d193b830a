"""A zip archive as torch.save writes it since 1.6: where its records lie, without reading them.

Knows zip's directory, its 64-bit form included (PKWARE's APPNOTE.TXT, 4.3), and torch's names in
it. Records are stored, never packed, so that a tensor's bytes are bytes of the file. Knows nothing
of what the pickle says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .pickle_machine import LONGEST_PICKLE, Buffer, Refused

MAGIC = b"PK\x03\x04"
MOST_RECORDS = 200_000
LONGEST_END = 22 + 65535
_END, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_UNKNOWN, _UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
_BROKEN = "is truncated or damaged: download it again"


@dataclass(frozen=True)
class Span:
    """Bytes of the file."""

    begin: int
    nbytes: int


@dataclass(frozen=True)
class Archive:
    """One archive. storages: key -> where it lies."""

    pickle: Span
    storages: Mapping[str, Span]
    big_endian: bool


def read(data: Buffer) -> Archive:
    """Where everything lies. Raises Refused for what is damaged or no state dict's archive."""
    records: dict[str, Span] = {}
    for name, span in _records(data):
        if name in records:
            raise Refused(f"is damaged: it holds {_short(name)} twice")
        records[name] = span
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Refused("is no archive of weights that torch.save wrote (TorchScript, or another)")
    root = roots[0]
    if records[f"{root}data.pkl"].nbytes > LONGEST_PICKLE:
        raise Refused("is refused: its pickle is larger than any list of tensors")
    storages = {
        name[len(root) + 5 :]: span
        for name, span in records.items()
        if name.startswith(f"{root}data/")
    }
    return Archive(
        records[f"{root}data.pkl"], storages, _big_endian(data, records.get(f"{root}byteorder"))
    )


def _big_endian(data: Buffer, span: Span | None) -> bool:
    if span is None:
        return False
    text = data[span.begin : span.begin + min(span.nbytes, 16)]
    if text not in (b"little", b"big"):
        raise Refused("is damaged: its byte order is neither little nor big")
    return text == b"big"


def _records(data: Buffer) -> Iterator[tuple[str, Span]]:
    count, begin, size = _directory(data)
    if count > MOST_RECORDS:
        raise Refused(f"is refused: it claims {count:,} records")
    if begin + size > len(data) or count * _ENTRY.size > size:
        raise Refused(_BROKEN)
    at = begin
    for _ in range(count):
        if at + _ENTRY.size > begin + size:
            raise Refused(_BROKEN)
        fields = _ENTRY.unpack(data[at : at + _ENTRY.size])
        name_size, extra_size, comment_size = fields[10:13]
        at += _ENTRY.size
        name = data[at : at + name_size]
        extra = data[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment_size
        yield _record(data, fields, name, extra, begin)


def _record(
    data: Buffer, fields: tuple[Any, ...], raw: bytes, extra: bytes, limit: int
) -> tuple[str, Span]:
    """One entry of the directory, held against what stands before its bytes."""
    name = raw.decode("utf-8", "replace")
    if fields[0] != b"PK\x01\x02":
        raise Refused(_BROKEN)
    flags, method, packed, size, place = (fields[index] for index in (3, 4, 8, 9, 16))
    size, packed, place = _widened(extra, size, packed, place)
    if method != 0 or flags & 1 or size != packed:
        raise Refused(f"packs or encrypts {_short(name)}, which torch.save never does")
    header = data[place : place + _LOCAL.size]
    if len(header) < _LOCAL.size:
        raise Refused(_BROKEN)
    local = _LOCAL.unpack(header)
    begin = place + _LOCAL.size + local[9] + local[10]
    if local[0] != MAGIC or data[place + _LOCAL.size : begin - local[10]] != raw:
        raise Refused(_BROKEN)
    if begin + size > limit:
        raise Refused(f"is truncated or damaged in {_short(name)}: download it again")
    return name, Span(begin, size)


def _directory(data: Buffer) -> tuple[int, int, int]:
    """How many records there are, where their directory begins, and its size."""
    tail = max(0, len(data) - LONGEST_END)
    at = data.rfind(b"PK\x05\x06", tail)
    if at < 0 or at + _END.size > len(data):
        raise Refused(_BROKEN)
    _, disk, _, _, count, size, begin, _ = _END.unpack(data[at : at + _END.size])
    if disk not in (0, _UNKNOWN_16):
        raise Refused("is one part of several: not read here")
    if count != _UNKNOWN_16 and size != _UNKNOWN and begin != _UNKNOWN:
        return count, begin, size
    locator = data[max(0, at - _LOCATOR.size) : at]
    if len(locator) < _LOCATOR.size or locator[:4] != b"PK\x06\x07":
        raise Refused(_BROKEN)
    place = _LOCATOR.unpack(locator)[2]
    wide = data[place : place + _END_64.size]
    if len(wide) < _END_64.size or wide[:4] != b"PK\x06\x06":
        raise Refused(_BROKEN)
    fields = _END_64.unpack(wide)
    return fields[7], fields[9], fields[8]


def _widened(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, those that did not fit taken from the 64-bit field."""
    wide: Iterator[tuple[int]] = iter(())
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + size]
            wide = struct.iter_unpack("<Q", field[: len(field) // 8 * 8])
        at += 4 + size
    found = []
    for number in numbers:
        if number == _UNKNOWN:
            number = next(wide, (-1,))[0]
        if not 0 <= number < 2**62:
            raise Refused(_BROKEN)
        found.append(number)
    return found


def _short(name: str) -> str:
    return ascii(name)[:60]
