"""A zip archive as torch.save writes it since 1.6: where its records lie, without reading them.

Records are stored, never compressed, so that a tensor's bytes are bytes of the file.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ...tensors import Malformed, shortened
from .unpickle import LONGEST_PICKLE, Buffer

MAGIC = b"PK\x03\x04"
LONGEST_DIRECTORY = 1 << 23
"""Bytes: about 100 of each of 80,000 records. `zipfile` makes an object of a record."""
_LOCAL_BYTES = 30
_IS_ENCRYPTED, _IS_UTF_8 = 0x1, 0x800
_BROKEN = "is truncated or damaged: download it again"


@dataclass(frozen=True)
class Span:
    begin: int
    nbytes: int

    def of(self, data: Buffer) -> bytes:
        return data[self.begin : self.begin + self.nbytes]


class _Bounded(io.FileIO):
    """`zipfile` reads the whole directory at once, of whatever size the archive claims."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > LONGEST_DIRECTORY:
            raise Malformed(f"is refused: its directory claims {size:,} bytes")
        return super().read(size) or b""


def read(file: Path, data: Buffer) -> tuple[Span, dict[str, Span], bool]:
    """Where the pickle lies, and each storage by its key; whether those are big-endian. Raises
    Malformed."""
    records = _records(file, data)
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Malformed("is no archive of weights that torch.save wrote (TorchScript, or another)")
    place = f"{roots[0]}data"
    if records[f"{place}.pkl"].nbytes > LONGEST_PICKLE:
        raise Malformed("is refused: its pickle is larger than any list of tensors")
    order = records.get(f"{roots[0]}byteorder")
    if order is not None and (order.nbytes > 6 or order.of(data) not in (b"little", b"big")):
        raise Malformed("is damaged: its byte order is neither little nor big")
    prefix = f"{place}/"
    storages = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    return records[f"{place}.pkl"], storages, order is not None and order.of(data) == b"big"


def _records(file: Path, data: Buffer) -> dict[str, Span]:
    """Every record by name: once each, stored as it is, none on top of another."""
    try:
        with _Bounded(file) as stream, zipfile.ZipFile(stream) as archive:
            entries, end = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError):
        raise Malformed(_BROKEN) from None
    records: dict[str, Span] = {}
    for entry in sorted(entries, key=lambda entry: entry.header_offset, reverse=True):
        span, name = _span(data, entry), entry.orig_filename
        if name in records:
            raise Malformed(f"is damaged: it holds {shortened(name)} twice")
        if span.begin + span.nbytes > end:
            raise Malformed(f"is truncated or damaged in {shortened(name)}: download it again")
        records[name], end = span, entry.header_offset
    if end:
        raise Malformed(_BROKEN)  # `read` saw a record at the beginning
    return records


def _span(data: Buffer, entry: zipfile.ZipInfo) -> Span:
    name, size = entry.orig_filename, entry.file_size
    stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == size
    if not stored or entry.flag_bits & _IS_ENCRYPTED:
        raise Malformed(f"compresses or encrypts {shortened(name)}, which torch.save never does")
    at = max(0, entry.header_offset)
    local = data[at : at + _LOCAL_BYTES]
    lengths = [int.from_bytes(local[place : place + 2], "little") for place in (26, 28)]
    begin = at + _LOCAL_BYTES + sum(lengths)
    raw = data[at + _LOCAL_BYTES : begin - lengths[1]]
    encoding = "utf-8" if entry.flag_bits & _IS_UTF_8 else "cp437"
    if local[:4] != MAGIC or raw.decode(encoding, "replace") != name:
        raise Malformed(_BROKEN)
    return Span(begin, size)
