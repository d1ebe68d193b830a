"""Reader of a file that torch.save has written, without torch: a zip archive, or an older stream.
The pickle may create plain values and call the functions in ADMITTED, and nothing else."""

import io
import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .. import tensors
from ..disk import open_map
from ..tensors import Contents, Malformed, TensorInfo, TensorReader

MOST_AXES = 16
LONGEST_PICKLE = 1 << 23
"""Most bytes of a pickle, enough for 50,000 tensors. A hostile pickle needs about 80 times as much
memory as it has bytes."""
ZIP_MAGIC, OLD_MAGIC = b"PK\x03\x04", 0x1950A86A20F9469CFC6C
_LOCAL_BYTES, _ENCRYPTED = 30, 0x1
_BROKEN = "is truncated or damaged: download it again"


@dataclass(frozen=True)
class TorchType:
    """An element type of torch. numpy: The numpy type that reads the bytes, an integer if numpy
    lacks the type. stored: The name in safetensors files."""

    numpy: str
    stored: str

    @property
    def size(self) -> int:
        return int(self.numpy[1:])


@dataclass(frozen=True)
class Storage:
    """A contiguous block of `count` elements in the file."""

    key: str
    kind: TorchType
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.kind.size


@dataclass(frozen=True)
class TorchTensor:
    """A view of a storage. offset and strides count elements of `kind`."""

    storage: Storage
    kind: TorchType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Entries(dict[Any, Any]):
    """A dictionary in a pickle. Keys must be plain values, because hashing a deeply nested tuple
    would overflow the stack."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | int | float | bytes | None):
            raise Malformed("is refused: its pickle has a dictionary key that is no plain value")
        super().__setitem__(key, value)


def _ordered_dict(pairs: Any = ()) -> Entries:
    entries = Entries()
    for key, value in pairs:
        entries[key] = value
    if pairs:
        pairs.clear()  # a hostile pickle could pass the same list to many calls, to fill memory
    return entries


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TorchTensor:
    """Make a tensor, as torch._utils._rebuild_tensor does. rest: Whether the tensor has a gradient,
    the hooks, and in some versions the element type and flags."""
    if any(isinstance(value, dict) and value for value in rest):
        raise Malformed("holds a tensor that is marked as negated or conjugated: not read here")
    _check(isinstance(storage, Storage), "tensor")
    kind = next((value for value in rest if isinstance(value, TorchType)), storage.kind)
    extents, places = (shape, strides) if type(shape) is type(strides) is tuple else ((), (None,))
    sized = all(_is_size(number) for number in (offset, *extents, *places))
    fits = sized and max(extents, default=0) <= tensors.LARGEST_EXTENT and len(rest) <= 4
    _check(fits and len(extents) == len(places) <= MOST_AXES, "tensor")
    last = sum((extent - 1) * stride for extent, stride in zip(extents, places, strict=True))
    if math.prod(extents) and (offset + last + 1) * kind.size > storage.nbytes:
        raise Malformed("is damaged: a tensor reaches beyond its storage")
    return TorchTensor(storage, kind, offset, shape, strides)


def _tensor_of_class(function: Any, _class: Any, arguments: Any, _attributes: Any) -> Any:
    _check(function is _tensor, "tensor")
    return function(*arguments)


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise Malformed(f"is damaged: its pickle describes a {what} wrongly")


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**62


_TYPES = (
    ("float64", "DoubleStorage", "F32"),
    ("float32", "FloatStorage", "F32"),
    ("float16", "HalfStorage", "F16"),
    ("bfloat16", "BFloat16Storage", "BF16"),
    ("float8_e4m3fn", "", "F8_E4M3"),
    ("int64", "LongStorage", "I64"),
    ("int32", "IntStorage", "I32"),
    ("int16", "ShortStorage", "I16"),
    ("int8", "CharStorage", "I8"),
    ("uint64", "", "U64"),
    ("uint32", "", "U32"),
    ("uint16", "", "U16"),
    ("uint8", "ByteStorage", "U8"),
    ("bool", "BoolStorage", "BOOL"),
)
"""torch's name of an element type, the name of its storage class, and the name in safetensors
files."""
KINDS = {
    name: TorchType("f8" if name == "float64" else tensors.ELEMENTS[stored][1], stored)
    for name, _, stored in _TYPES
}
ADMITTED: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, gradient, hooks: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, grad, hooks, state: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_of_class,
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): lambda extents: extents,
    ("torch", "device"): lambda kind, index=None: None,
    **{("torch", name): KINDS[kind] for kind, name, _ in _TYPES if name},
    ("torch", "UntypedStorage"): KINDS["uint8"],
    ("torch.storage", "UntypedStorage"): KINDS["uint8"],
    **{("torch", name): kind for name, kind in KINDS.items()},
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
}
"""Every name that a pickle may use: (module, name) -> the object that it gets instead."""
_OPERATIONS = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE
BINUNICODE BINUNICODE8 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE
TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT
MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID
"""
"""The pickle operations that state dicts need. Other operations hash tuples, or allocate memory of
a size that the pickle states."""
_CODES = b"".join(getattr(pickle, name) for name in _OPERATIONS.split())
_Base: Any = pickle._Unpickler


class Unpickler(_Base):
    """The unpickler in Python. The one in C allocates memory up to the largest index of its memo.
    storages: Key -> storage that the pickle mentions."""

    dispatch: ClassVar = {
        **{code: _Base.dispatch[code] for code in _CODES},
        pickle.EMPTY_DICT[0]: lambda self: self.append(Entries()),
        # The state of a dictionary is metadata, which is not needed.
        pickle.BUILD[0]: lambda self: self.stack.pop(),
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin1")  # for strings of Python 2
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            shown = ascii(f"{module}.{name}")[1:-1]
            raise Malformed(f"is refused: it asks for {shown:.120}, which is not read here")
        return ADMITTED[module, name]

    def persistent_load(self, identity: Any) -> Storage:
        if not (type(identity) is tuple and len(identity) in (5, 6) and identity[0] == "storage"):
            raise Malformed("is damaged or no state dict: its pickle refers to what is no storage")
        _, kind, key, _, count, *view = identity
        sound = isinstance(kind, TorchType) and type(key) is str and _is_size(count)
        _check(sound and view in ([], [None]), "storage")
        self.storages[key] = storage = Storage(key, kind, count)
        return storage


def load(data: mmap.mmap, begin: int) -> tuple[Any, Mapping[str, Storage], int]:
    """Return the value of the pickle at position `begin`, the storages by key, and the position
    after the pickle. Raises Malformed."""
    stream = io.BytesIO(data[begin : begin + LONGEST_PICKLE])
    unpickler = Unpickler(stream)
    try:
        return unpickler.load(), unpickler.storages, begin + stream.tell()
    except Malformed:
        raise
    except Exception:  # operations on damaged data raise many types
        if stream.tell() == LONGEST_PICKLE:
            raise Malformed(f"is refused: its pickle has over {LONGEST_PICKLE:,} bytes") from None
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
        self.paths = (file,)
        self._data = open_map(file)
        with tensors.naming(file):
            if self._data[:4] == ZIP_MAGIC:
                value, self._spans, self._order = _read_zip(file, self._data)
            elif self._data[:1] == b"\x80":
                (value, self._spans), self._order = _read_old(self._data), "<"
            else:
                raise Malformed("is no file that torch.save wrote, or its beginning is damaged")
            self._tensors = named_tensors(value)
            self.infos = {name: self._info(name, view) for name, view in self._tensors.items()}

    @property
    def contents(self) -> Contents:
        first: dict[TorchTensor, str] = {}
        shared = {n: first[t] for n, t in self._tensors.items() if first.setdefault(t, n) != n}
        return Contents(self.infos, {name: name for name in self.infos}, shared=shared)

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        tensor = self._tensors[name]
        kind, span = tensor.kind, self._spans[tensor.storage.key]
        shape, offset = tensor.shape, tensor.offset
        if shape:
            shape, offset = (end - begin, *shape[1:]), offset + begin * tensor.strides[0]
        if not math.prod(shape):
            return tensors.to_mlx(np.empty(shape, f"<{kind.numpy}"), kind.stored)
        strides = tuple(stride * kind.size for stride in tensor.strides)
        place = span.start + offset * kind.size
        values = np.ndarray(shape, f"{self._order}{kind.numpy}", self._data, place, strides)
        return tensors.to_mlx(values, kind.stored)

    def _info(self, name: str, tensor: TorchTensor) -> TensorInfo:
        span = self._spans.get(tensor.storage.key)
        if span is None:
            raise Malformed(f"is damaged: the bytes of {name} are not in it")
        if tensor.storage.nbytes > span.stop - span.start:
            raise Malformed(f"is truncated or damaged in {name}: download it again")
        # With a stride of zero, a few bytes could pretend to be a tensor of any size.
        if math.prod(tensor.shape) * tensor.kind.size > len(self._data):
            raise Malformed(f"is refused: {name} claims more bytes than the file has")
        return TensorInfo.of(tensor.kind.stored, tensor.shape)


def _read_zip(file: Path, data: mmap.mmap) -> tuple[Any, dict[str, slice], str]:
    """Read the archive that torch.save writes since 1.6, whose records are not compressed. Return
    the saved value, the span of each storage in the file by key, and the byte order."""
    records = _records(file, data)
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Malformed("is no archive of weights that torch.save wrote (TorchScript, or another)")
    prefix, begin = f"{roots[0]}data/", records[f"{roots[0]}data.pkl"].start
    order = data[records.get(f"{roots[0]}byteorder", slice(0))][:7]
    if order not in (b"", b"little", b"big"):
        raise Malformed("is damaged: its byte order is neither little nor big")
    spans = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    return load(data, begin)[0], spans, ">" if order == b"big" else "<"


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
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == size
        if not stored or entry.flag_bits & _ENCRYPTED:
            raise Malformed(f"compresses or encrypts {shown}: save it with torch")
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
