"""One file that torch.save wrote, zip archive or older stream, as named tensors, without torch."""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..disk import open_map
from ..tensors import Contents, Malformed, Reader, TensorInfo, naming, shortened, to_mlx
from .torch_pickle import LONGEST_PICKLE, Storage, Tensor, load, named_tensors, storage

ZIP_MAGIC = b"PK\x03\x04"
OLD_MAGIC, OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_BYTES, _ENCRYPTED = 30, 0x1
_BROKEN = "is truncated or damaged: download it again"


class TorchFile(Reader):
    """The tensors of one file, tied ones under each of their names."""

    def __init__(self, file: Path) -> None:
        self.paths = (file,)
        self._data = open_map(file)
        with naming(file):
            if self._data[:4] == ZIP_MAGIC:
                value, self._spans, self._order = _read_zip(file, self._data)
            elif self._data[:1] == b"\x80":
                (value, self._spans), self._order = _read_old(self._data), "<"
            else:
                raise Malformed("is no file that torch.save wrote, or its beginning is damaged")
            self._tensors = named_tensors(value)
            self.infos = {name: self._info(name, each) for name, each in self._tensors.items()}

    @property
    def contents(self) -> Contents:
        shared: dict[str, str] = {}
        first: dict[Tensor, str] = {}
        for name, tensor in self._tensors.items():
            if first.setdefault(tensor, name) != name:
                shared[name] = first[tensor]
        return Contents(self.infos, {name: name for name in self.infos}, shared=shared)

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        tensor = self._tensors[name]
        kind, span = tensor.kind, self._spans[tensor.storage.key]
        shape, offset = tensor.shape, tensor.offset
        if shape:
            shape, offset = (end - begin, *shape[1:]), offset + begin * tensor.strides[0]
        if not math.prod(shape):
            return to_mlx(np.empty(shape, f"<{kind.numpy}"), kind.stored)
        begins, strides = offset * kind.size, tuple(each * kind.size for each in tensor.strides)
        dtype = np.dtype(f"{self._order}{kind.numpy}")
        values = np.ndarray(shape, dtype, self._data, span.start + begins, strides)
        return to_mlx(values, kind.stored)

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        span = self._spans.get(tensor.storage.key)
        if span is None:
            raise Malformed(f"is damaged: the bytes of {name} are not in it")
        if tensor.storage.nbytes > span.stop - span.start:
            raise Malformed(f"is truncated or damaged in {name}: download it again")
        # A stride of zero lets a few bytes claim to be a tensor of any size.
        if math.prod(tensor.shape) * tensor.kind.size > len(self._data):
            raise Malformed(f"is refused: {name} claims more bytes than the file has")
        return TensorInfo.of(tensor.kind.stored, tensor.shape)


def _read_zip(file: Path, data: mmap.mmap) -> tuple[Any, dict[str, slice], str]:
    """The saved value, the bytes of each storage, and their order, of the archive that torch.save
    writes since 1.6, whose records are not compressed."""
    records = _records(file, data)
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Malformed("is no archive of weights that torch.save wrote (TorchScript, or another)")
    prefix, pickle = f"{roots[0]}data/", records[f"{roots[0]}data.pkl"]
    if pickle.stop - pickle.start > LONGEST_PICKLE:
        raise Malformed("is refused: its pickle is larger than any list of tensors")
    order = data[records.get(f"{roots[0]}byteorder", slice(0))][:7]
    if order not in (b"", b"little", b"big"):
        raise Malformed("is damaged: its byte order is neither little nor big")
    storages = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    return load(data[pickle], 0)[0], storages, ">" if order == b"big" else "<"


def _records(file: Path, data: mmap.mmap) -> dict[str, slice]:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError):
        raise Malformed(_BROKEN) from None
    records: dict[str, slice] = {}
    for entry in entries:
        name, at, size = entry.orig_filename, max(0, entry.header_offset), entry.file_size
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == size
        if not stored or entry.flag_bits & _ENCRYPTED:
            raise Malformed(f"compresses or encrypts {shortened(name)}: save it with torch")
        # The header has the lengths of what follows it: the record's name and an extra field.
        header = data[at : at + _LOCAL_BYTES].ljust(_LOCAL_BYTES)
        begin = at + _LOCAL_BYTES + sum(struct.unpack_from("<2H", header, 26))
        if header[:4] != ZIP_MAGIC or begin + size > len(data):
            raise Malformed(f"is truncated or damaged in {shortened(name)}: download it again")
        records[name] = slice(begin, begin + size)
    return records


def _read_old(data: mmap.mmap) -> tuple[Any, dict[str, slice]]:
    """The stream that torch.save wrote before 1.6: five pickles, then the storages one after
    another, each behind its number of elements, little-endian on any machine."""
    storages: dict[str, Storage] = {}

    def remember(identity: Any) -> Storage:
        place = storage(identity)
        storages[place.key] = place
        return place

    magic, at = load(data, 0)
    if magic != OLD_MAGIC:
        raise Malformed("is a pickle, but none that torch.save wrote")
    protocol, at = load(data, at)
    if protocol != OLD_PROTOCOL:
        raise Malformed("is written by an unknown version of torch.save")
    _, at = load(data, at)
    value, at = load(data, at, remember)
    order, at = load(data, at)
    spans: dict[str, slice] = {}
    if type(order) is not list or any(type(key) is not str for key in order):
        raise Malformed(_BROKEN)
    for key in order:
        if key not in storages:
            raise Malformed("is damaged: its list of storages does not fit its tensors")
        place = storages[key]
        spans[key] = slice(at + 8, at + 8 + place.nbytes)
        sound = int.from_bytes(data[at : at + 8], "little") == place.count
        at += 8 + place.nbytes
        if not sound or at > len(data):
            raise Malformed(_BROKEN)
    return value, spans
