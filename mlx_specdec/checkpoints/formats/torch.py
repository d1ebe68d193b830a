"""Reader of a file that torch.save has written, without torch: a zip archive, or an older stream.
The pickle may create plain values and call the functions in ADMITTED, and nothing else."""

import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .. import tensors
from ..disk import open_map
from ..tensors import Malformed, TensorInfo, TensorReader

ZIP_MAGIC, OLD_MAGIC = b"PK\x03\x04", 0x1950A86A20F9469CFC6C
_LOCAL_BYTES = 30
_BROKEN = "is truncated or damaged: download it again"


@dataclass(frozen=True)
class Storage:
    """A contiguous block of `count` elements in the file. kind: torch's name of their type."""

    key: str
    kind: str
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * TORCH_TYPES[self.kind].itemsize


@dataclass(frozen=True)
class TorchTensor:
    """A view of a storage. offset and strides count elements of `kind`, torch's name of a type."""

    storage: Storage
    kind: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TorchTensor:
    """Make a tensor, as torch._utils._rebuild_tensor does. rest: Whether the tensor has a gradient,
    the hooks, and in some versions the element type and flags."""
    kind = next((value for value in rest if isinstance(value, str)), storage.kind)
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    nbytes = (offset + last + 1) * TORCH_TYPES[kind].itemsize
    reaches = bool(math.prod(shape)) and nbytes > storage.nbytes
    if reaches or min((offset, *shape, *strides)) < 0:
        raise Malformed("is damaged: a tensor reaches beyond its storage")
    return TorchTensor(storage, kind, offset, tuple(shape), tuple(strides))


_FLOATS = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"}
_INTEGERS = {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
_CLASSES = {**_FLOATS, **_INTEGERS, "Bool": "bool", "Untyped": "uint8"}
STORAGES = {f"{name}Storage": kind for name, kind in _CLASSES.items()}
"""Name of torch's class of storages -> torch's name of the element type."""
STORED = {tensors.dtype_name(dtype): name for name, dtype in tensors.DTYPES.items()}
STORED |= {"uint8": "U8", "bool": "BOOL", "float64": "F32", "float8_e4m3fn": "F8_E4M3"}
"""torch's name of an element type -> the name in safetensors files."""
TORCH_TYPES = {name: np.dtype(f"<{tensors.ELEMENTS[to][1]}") for name, to in STORED.items()}
TORCH_TYPES["float64"] = np.dtype("<f8")
"""torch's name of an element type -> the numpy type that reads the bytes, an integer if numpy lacks
the type."""
ADMITTED: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, gradient, hooks: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, grad, hooks, state: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, values, state: function(
        *values
    ),
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): lambda extents: extents,
    ("torch", "device"): lambda kind, index=None: None,
    **{("torch", name): kind for name, kind in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
    **{("torch", name): name for name in STORED},
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
}
"""Every name that a pickle may use: (module, name) -> the object that it gets instead."""
_Base: Any = pickle._Unpickler


def _list(count: int, self: "Unpickler") -> None:
    """Make a list of the newest `count` values."""
    self.stack[-count:] = [self.stack[-count:]]


class Unpickler(_Base):
    """The unpickler in Python, whose operations can be changed. Tuples become lists. A few bytes
    can make a tuple that has another one twice, which has a third one twice, and so on. The hash of
    such a tuple would take years, and a list has none. storages: Key -> storage that the pickle
    mentions."""

    # The state of a dictionary is metadata, which is not needed. Nothing else may be changed by it.
    dispatch: ClassVar = {
        **_Base.dispatch,
        pickle.BUILD[0]: lambda self: self.stack.pop(),
        pickle.EMPTY_TUPLE[0]: _Base.load_empty_list,
        pickle.TUPLE[0]: _Base.load_list,
        pickle.TUPLE1[0]: partial(_list, 1),
        pickle.TUPLE2[0]: partial(_list, 2),
        pickle.TUPLE3[0]: partial(_list, 3),
    }

    def __init__(self, file: mmap.mmap) -> None:
        super().__init__(file, encoding="latin1")  # for strings of Python 2
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            shown = ascii(f"{module}.{name}")[1:-1]
            raise Malformed(f"is refused: it asks for {shown:.120}, which is not read here")
        return ADMITTED[module, name]

    def persistent_load(self, identity: Any) -> Storage:
        _, kind, key, _, count, *view = identity
        if kind not in STORED or type(key) is not str or count < 0 or view not in ([], [None]):
            raise Malformed("is damaged or no state dict: its pickle refers to what is no storage")
        self.storages[key] = storage = Storage(key, kind, count)
        return storage


def load(data: mmap.mmap, begin: int) -> tuple[Any, Mapping[str, Storage], int]:
    """Return the value of the pickle at position `begin`, the storages by key, and the position
    after the pickle. Raises Malformed."""
    data.seek(begin)
    unpickler = Unpickler(data)
    try:
        return unpickler.load(), unpickler.storages, data.tell()
    except Malformed:
        raise
    except Exception:  # operations on damaged data raise many types
        raise Malformed("is truncated or damaged in its pickle: download it again") from None


def named_tensors(value: Any) -> dict[str, TorchTensor]:
    """Return the tensors of a state dict by name, without other values. Raises Malformed."""
    outer = value if isinstance(value, dict) else {}
    inner = (outer.get(key) for key in ("state_dict", "model"))
    entries = next((entry for entry in inner if isinstance(entry, dict)), outer)
    found = {name: entry for name, entry in entries.items() if isinstance(entry, TorchTensor)}
    for name in found:
        tensors.check_name(name)
    if not found:
        raise Malformed("holds no state dict: tensors with names are needed")
    return found


class TorchFile(TensorReader):
    """The tensors of a file. A tied tensor has an entry under each name."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.paths = (file,)
        self._data = open_map(file)
        with tensors.naming(file):
            if self._data[:4] == ZIP_MAGIC:
                value, self._spans = _read_zip(file, self._data)
            elif self._data[:1] == b"\x80":
                value, self._spans = _read_old(self._data)
            else:
                raise Malformed("is no file that torch.save wrote, or its beginning is damaged")
            self._tensors = named_tensors(value)
            self.infos = {name: self._info(name, view) for name, view in self._tensors.items()}
        self.stored, self.origins = self.infos, {name: name for name in self.infos}
        first: dict[TorchTensor, str] = {}
        views = self._tensors.items()
        self.shared = {n: first[view] for n, view in views if first.setdefault(view, n) != n}

    def read(self, name: str) -> mx.array:
        tensor = self._tensors[name]
        kind, span = TORCH_TYPES[tensor.kind], self._spans[tensor.storage.key]
        if not math.prod(tensor.shape):
            return tensors.to_mlx(np.empty(tensor.shape, kind), STORED[tensor.kind])
        strides = tuple(stride * kind.itemsize for stride in tensor.strides)
        place = span.start + tensor.offset * kind.itemsize
        values = np.ndarray(tensor.shape, kind, self._data, place, strides)
        return tensors.to_mlx(values, STORED[tensor.kind])

    def _info(self, name: str, tensor: TorchTensor) -> TensorInfo:
        span = self._spans.get(tensor.storage.key)
        if span is None:
            raise Malformed(f"is damaged: the bytes of {name} are not in it")
        if tensor.storage.nbytes > span.stop - span.start:
            raise Malformed(f"is truncated or damaged in {name}: download it again")
        return TensorInfo.of(STORED[tensor.kind], tensor.shape)


def _read_zip(file: Path, data: mmap.mmap) -> tuple[Any, dict[str, slice]]:
    """Read the archive that torch.save writes since 1.6, whose records are not compressed. Return
    the saved value, and the span of each storage in the file by key."""
    records = _records(file, data)
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Malformed("is no archive of weights that torch.save wrote (TorchScript, or another)")
    prefix, begin = f"{roots[0]}data/", records[f"{roots[0]}data.pkl"].start
    if data[records.get(f"{roots[0]}byteorder", slice(0))] not in (b"", b"little"):
        raise Malformed("is of a big-endian machine: save it again on another one")
    spans = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    return load(data, begin)[0], spans


def _records(file: Path, data: mmap.mmap) -> dict[str, slice]:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError):
        raise Malformed(_BROKEN) from None
    records: dict[str, slice] = {}
    for entry in entries:
        name, at, size = entry.orig_filename, max(0, entry.header_offset), entry.file_size
        shown = tensors.shortened(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            raise Malformed(f"compresses {shown}: save it with torch")
        # The header has the lengths of the record's name and of an extra field, which follow it.
        header = data[at : at + _LOCAL_BYTES].ljust(_LOCAL_BYTES)
        begin = at + _LOCAL_BYTES + sum(struct.unpack_from("<2H", header, 26))
        if header[:4] != ZIP_MAGIC or begin + size > len(data):
            raise Malformed(f"is truncated or damaged in {shown}: download it again")
        records[name] = slice(begin, begin + size)
    return records


def _read_old(data: mmap.mmap) -> tuple[Any, dict[str, slice]]:
    """Read the stream that torch.save wrote before 1.6: five pickles, then the storages, each after
    its number of elements. Return the saved value, and the span of each storage by key."""
    magic, _, at = load(data, 0)
    if magic != OLD_MAGIC:
        raise Malformed("is a pickle, but none that torch.save wrote")
    for _ in ("version", "sizes of this machine's types"):
        _, _, at = load(data, at)
    value, storages, at = load(data, at)
    order, _, at = load(data, at)
    if type(order) is not list or not all(type(key) is str and key in storages for key in order):
        raise Malformed("is damaged: its list of storages does not fit its tensors")
    spans: dict[str, slice] = {}
    for key in order:
        begin, count = at + 8, int.from_bytes(data[at : at + 8], "little")
        at = begin + storages[key].nbytes
        if count != storages[key].count or at > len(data):
            raise Malformed(_BROKEN)
        spans[key] = slice(begin, at)
    return value, spans
