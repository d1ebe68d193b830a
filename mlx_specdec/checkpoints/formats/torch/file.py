"""One file of torch.save's, zip archive or older stream, as a set of named tensors, without torch.

The pickle in it is read by `unpickle`, which can build plain values only.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...disk.reading import open_map
from ...tensors import Contents, Malformed, Reader, TensorInfo, naming, to_mlx
from . import zip
from .objects import ADMITTED, Names, Storage, Tensor, named_tensors, storage
from .unpickle import load

OLD_MAGIC = 0x1950A86A20F9469CFC6C
OLD_PROTOCOL = 1001
_BROKEN = "is truncated or damaged: download it again"


class TorchFile(Reader):
    """The tensors of one file, mapped, as a safetensors file would have them: contiguous, tied ones
    under each of their names."""

    def __init__(self, file: Path) -> None:
        """Raises CheckpointError also where the pickle asks for what weights do not need."""
        self.paths = (file,)
        self._data = open_map(file)
        with naming(file):
            value, self._spans, self._big_endian = _read(file, self._data)
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
        values: np.ndarray[Any, Any] = np.ndarray(
            shape,
            np.dtype(f"{'>' if self._big_endian else '<'}{kind.numpy}"),
            self._data,
            span.begin + offset * kind.size,
            tuple(stride * kind.size for stride in tensor.strides),
        )
        return to_mlx(values, kind.stored)

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        span = self._spans.get(tensor.storage.key)
        if span is None:
            raise Malformed(f"is damaged: the bytes of {name} are not in it")
        if tensor.storage.nbytes > span.nbytes:
            raise Malformed(f"is truncated or damaged in {name}: download it again")
        # A stride of zero lets a few bytes claim to be a tensor of any size.
        if math.prod(tensor.shape) * tensor.kind.size > len(self._data):
            raise Malformed(f"is refused: {name} claims more bytes than the file has")
        return TensorInfo.of(tensor.kind.stored, tensor.shape)


def _read(file: Path, data: mmap.mmap) -> tuple[Any, Mapping[str, zip.Span], bool]:
    """What was saved, where each storage lies, and whether those are big-endian."""
    if data[:4] == zip.MAGIC:
        pickle, storages, big_endian = zip.read(file, data)
        value, _ = load(pickle.of(data), 0, ADMITTED, storage)
        return value, storages, big_endian
    if data[:1] == b"\x80":
        return (*_read_old(data), False)
    if data[257:262] == b"ustar":
        raise Malformed("is written by a torch before 0.2: save it again with a newer one")
    raise Malformed("is no file that torch.save wrote, or its beginning is damaged")


def _read_old(data: mmap.mmap) -> tuple[Any, dict[str, zip.Span]]:
    """The stream that torch.save wrote before 1.6: five pickles, then the storages one after
    another, each behind its number of elements, little-endian on any machine."""
    magic, at = load(data, 0, Names(), storage)
    if magic != OLD_MAGIC:
        raise Malformed("is a pickle, but none that torch.save wrote")
    protocol, at = load(data, at, Names(), storage)
    if protocol != OLD_PROTOCOL:
        raise Malformed("is written by an unknown version of torch.save")
    _, at = load(data, at, Names(), storage)
    storages: dict[str, Storage] = {}

    def remember(identity: Any) -> Storage:
        place = storage(identity)
        if storages.setdefault(place.key, place) != place:
            raise Malformed("is damaged: it describes one storage in two ways")
        return place

    value, at = load(data, at, ADMITTED, remember)
    order, at = load(data, at, Names(), storage)
    if type(order) is not list or any(type(key) is not str for key in order):
        raise Malformed(_BROKEN)
    if len({*order}) < len(order) or not storages.keys() >= {*order}:
        raise Malformed("is damaged: its list of storages does not fit its tensors")
    spans: dict[str, zip.Span] = {}
    for key in order:
        place = storages[key]
        spans[key] = zip.Span(at + 8, place.nbytes)
        sound = int.from_bytes(data[at : at + 8], "little") == place.count
        at += 8 + place.nbytes
        if not sound or at > len(data):
            raise Malformed(_BROKEN)
    return value, spans
