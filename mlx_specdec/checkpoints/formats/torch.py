"""What a torch state dict is made of: storages, tensors that view them, and how they are named.

ADMITTED is the whole list of names that a pickle may use; no storage is read here.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..disk import open_map
from ..tensors import (
    ELEMENTS,
    LARGEST_EXTENT,
    Contents,
    Malformed,
    Reader,
    TensorInfo,
    check_name,
    naming,
    shortened,
    to_mlx,
)

MOST_AXES = 16
INNER = ("state_dict", "model")
"""Keys under which a training program may have put the state dict."""


@dataclass(frozen=True)
class Kind:
    """An element type. numpy: how its bytes are read; stored: its name in a safetensors file.

    bfloat16 and float8 are read as integers, which have their bits; float64 becomes float32.
    """

    numpy: str
    stored: str

    @property
    def size(self) -> int:
        return int(self.numpy[1:])


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
"""torch's name, that of its class of storages, and that of a safetensors file."""
KINDS = {
    name: Kind("f8" if name == "float64" else ELEMENTS[stored][1], stored)
    for name, _, stored in _TYPES
}
_UNREAD = re.compile(r"(float8_|complex|qu?int)\w+|(Complex|QU?Int)\w+Storage")
"""Names in torch of element types that MLX does not have, or that weights are not kept in here."""


class Names(dict[tuple[str, str], Any]):
    """(module, name) -> what a pickle gets for it; asking for any other raises Malformed."""

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key[0] == "torch" and _UNREAD.fullmatch(key[1]):
            raise Malformed(f"holds tensors of the type {key[1]}, which is not read here")
        shown = ascii(".".join(key))[1:-1]
        raise Malformed(
            f"is refused: it asks for {shown:.120}, and weights need nothing of the kind (it may "
            "be malicious, or no plain state dict)"
        )


@dataclass(frozen=True)
class StorageClass:
    kind: Kind


@dataclass(frozen=True)
class Storage:
    """A run of elements in the archive. count: how many, in elements of `kind`."""

    key: str
    kind: Kind
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.kind.size


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count elements of `kind`, not bytes."""

    storage: Storage
    kind: Kind
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage(identity: Any) -> Storage:
    """The storage that a persistent id stands for. Raises Malformed."""
    if not (type(identity) is tuple and len(identity) in (5, 6) and identity[0] == "storage"):
        raise Malformed("is damaged or no state dict: its pickle refers to what is no storage")
    _, place, key, _, count, *view = identity
    if not isinstance(place, StorageClass) or type(key) is not str or not _is_size(count):
        raise Malformed("is damaged: its pickle describes a storage wrongly")
    if view not in ([], [None]):
        raise Malformed("is written by a torch before 0.4: save it again with a newer one")
    return Storage(key, place.kind, count)


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a state dict by name; the rest is passed over. Raises Malformed."""
    if isinstance(value, dict):
        inner = (value[key] for key in INNER if isinstance(value.get(key), dict))
        value = next(inner, value)
    entries = value.items() if isinstance(value, dict) else ()
    tensors = {name: each for name, each in entries if isinstance(each, Tensor)}
    for name in tensors:
        check_name(name)
    if not tensors:
        raise Malformed("holds no state dict: tensors with names are needed")
    return tensors


# What follows is called with whatever a pickle has as arguments; of a number of arguments that does
# not fit, and of operations that a value does not have, `unpickle.load` makes Malformed.


def _rebuild_tensor(place: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    kind = getattr(place, "kind", None)
    return _rebuild_tensor_of_type(place, offset, shape, strides, None, None, kind, *rest[2:])


def _rebuild_tensor_of_type(
    place: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Tensor:
    """rest: two that no weight needs, the type, and marks."""
    _, _, kind, *marks = rest
    if any(marks):
        raise Malformed("holds a tensor that is marked as negated or conjugated: not read here")
    _check(
        isinstance(kind, Kind)
        and isinstance(place, Storage)
        and _is_size(offset)
        and type(shape) is tuple
        and type(strides) is tuple
        and len(shape) == len(strides) <= MOST_AXES
        and all(_is_size(number) for number in (*shape, *strides))
        and all(extent <= LARGEST_EXTENT for extent in shape),
        "tensor",
    )
    if math.prod(shape):
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if (offset + last + 1) * kind.size > place.nbytes:
            raise Malformed("is damaged: a tensor reaches beyond its storage")
    return Tensor(place, kind, offset, shape, strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> Tensor:
    _check(isinstance(tensor, Tensor), "parameter")
    return tensor


def _rebuild_from_type(function: Any, named: Any, arguments: Any, _attributes: Any) -> Any:
    sound = function in _BUILDERS.values() and type(arguments) is tuple and named is _MENTION
    _check(sound, "tensor")
    return function(*arguments)


def _ordered_dict(*pairs: Any) -> dict[Any, Any]:
    _check(not pairs or type(pairs[0]) is list, "dictionary")
    plain = (type(pair) in (list, tuple) and type(pair[0]) is str for pair in (*pairs, [])[0])
    _check(len(pairs) < 2 and all(plain), "dictionary")
    return dict(*pairs)


def _size(extents: Any) -> tuple[Any, ...]:
    _check(type(extents) in (tuple, list), "size")
    return tuple(extents)


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise Malformed(f"is damaged: its pickle describes a {what} wrongly")


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**62


_MENTION = object()
"""A class that is only mentioned: torch.Tensor, torch.nn.Parameter."""
_BUILDERS = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_of_type,
}
ADMITTED = Names(
    {
        **_BUILDERS,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
        ("collections", "OrderedDict"): _ordered_dict,
        ("torch", "Size"): _size,
        ("torch", "device"): lambda *_: None,
        **{("torch", name): StorageClass(KINDS[kind]) for kind, name, _ in _TYPES if name},
        ("torch", "UntypedStorage"): StorageClass(KINDS["uint8"]),
        ("torch.storage", "UntypedStorage"): StorageClass(KINDS["uint8"]),
        **{("torch", name): kind for name, kind in KINDS.items()},
        ("torch", "Tensor"): _MENTION,
        ("torch.nn.parameter", "Parameter"): _MENTION,
    }
)
"""Every name that a pickle may use. Calling one builds a record here and runs nothing of torch."""


PROTOCOLS = range(2, 6)
MOST_READS = 2_000_000
"""Of operations and their arguments, about 60 a tensor, so 30,000 tensors in a file; each leaves at
most some 100 bytes."""
LONGEST_PICKLE = 1 << 26
LONGEST_TEXT = 1 << 20
LONGEST_NAME = 200
LONGEST_INTEGER = 16
_DAMAGED = "is truncated or damaged in its pickle: download it again"
_PLAIN = (str, int, float, bytes, type(None))
_ADMITTED = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL "
    "STACK_GLOBAL REDUCE BUILD BINPERSID"
)

Table = Mapping[tuple[str, str], Any]
"""(module, name) -> what it stands for: a function that checks its arguments, or a value."""


def load(
    data: bytes | mmap.mmap, begin: int, admitted: Table, persistent: Callable[[Any], Any]
) -> tuple[Any, int]:
    """The value of the pickle that begins at `begin`, and where it ends.

    persistent: what a persistent id stands for. The value consists of None, bool, int, float, str,
    bytes, list, tuple, dict and of what `admitted` and `persistent` give. Raises Malformed.
    """
    source = _Source(data, begin)
    unpickler = _Unpickler(source, admitted, persistent)
    try:
        value = unpickler.load()
    except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError):
        raise Malformed(_DAMAGED) from None
    if unpickler.stack or unpickler.metastack:
        raise Malformed("is damaged: its pickle ends in the middle of a value")
    return value, source.at


class _Source:
    """A pickle's bytes as the unpickler asks for them, within limits."""

    def __init__(self, data: bytes | mmap.mmap, begin: int) -> None:
        self._data, self.at, self._end = data, begin, min(len(data), begin + LONGEST_PICKLE)
        self._left = MOST_READS

    def spend(self, work: int) -> None:
        """Count work done, in reads or in elements copied."""
        self._left -= work
        if self._left < 0:
            raise Malformed(f"is refused: its pickle has more than {MOST_READS:,} operations")

    def read(self, size: int) -> bytes:
        self.spend(1)
        if size > LONGEST_TEXT:
            raise Malformed(f"is refused: its pickle holds a text of {size:,} bytes")
        if size > self._end - self.at:
            raise Malformed(_DAMAGED)
        self.at += size
        return self._data[self.at - size : self.at]

    def readline(self) -> bytes:
        stop = self._data.find(b"\n", self.at, self.at + LONGEST_NAME + 1)
        return self.read(stop + 1 - self.at if stop >= 0 else LONGEST_PICKLE)


class _Unpickler(pickle._Unpickler):
    """`stack` has the values since the last mark, `metastack` those below it."""

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, source: _Source, admitted: Table, persistent: Callable[[Any], Any]) -> None:
        super().__init__(source, encoding="latin-1")  # Python 2's texts are bytes
        self._source, self._admitted, self._persistent = source, admitted, persistent

    def find_class(self, module: str, name: str) -> Any:
        return self._admitted[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def load_proto(self) -> None:
        version = self.read(1)[0]
        if version not in PROTOCOLS:
            raise Malformed(f"is written with pickle protocol {version}: not read here")

    def load_frame(self) -> None:
        self.read(8)  # how much to read at once; here all is at hand

    def load_long1(self) -> None:
        size = self.read(1)[0]
        if size > LONGEST_INTEGER:
            raise Malformed(f"is refused: its pickle holds a number of {size} bytes")
        self.append(pickle.decode_long(self.read(size)))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def load_setitem(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._fill(items)

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        # Hashing a deeply nested tuple would overrun the interpreter's own stack.
        if not all(isinstance(key, _PLAIN) for key in items[::2]):
            raise Malformed("is refused: its pickle has a dictionary key that is no plain value")
        if type(self.stack[-1]) is not dict:
            raise Malformed(_DAMAGED)
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_build(self) -> None:
        """The state of an object: only dictionaries get one, their metadata, which nobody needs."""
        if not (isinstance(self.stack.pop(), dict) and type(self.stack[-1]) is dict):
            raise Malformed("is damaged: its pickle sets the state of an object")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise Malformed(_DAMAGED)
        # One list may be handed to many calls, each of which may copy it.
        self._source.spend(sum(len(each) for each in arguments if isinstance(each, list | tuple)))
        self.stack[-1] = self.stack[-1](*arguments)


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        import pickletools

        names = {each.code: each.name for each in pickletools.opcodes}
        name = names.get(chr(code), f"0x{code:02x}")
        raise Malformed(f"uses the pickle operation {name}: not read here")


def _admitted_operations() -> _Operations:
    codes = [getattr(pickle, name)[0] for name in _ADMITTED.split()]
    whole = pickle._Unpickler.dispatch
    return _Operations({code: getattr(_Unpickler, whole[code].__name__) for code in codes})


_Unpickler.dispatch = _admitted_operations()


ZIP_MAGIC = b"PK\x03\x04"
LONGEST_DIRECTORY = 1 << 23
"""Bytes: about 100 of each of 80,000 records. `zipfile` makes an object of a record."""
_LOCAL_BYTES = 30
_IS_ENCRYPTED, _IS_UTF_8 = 0x1, 0x800
OLD_MAGIC = 0x1950A86A20F9469CFC6C
OLD_PROTOCOL = 1001
_BROKEN = "is truncated or damaged: download it again"


@dataclass(frozen=True)
class Span:
    begin: int
    nbytes: int

    def of(self, data: mmap.mmap) -> bytes:
        return data[self.begin : self.begin + self.nbytes]


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


def _read(file: Path, data: mmap.mmap) -> tuple[Any, Mapping[str, Span], bool]:
    """What was saved, where each storage lies, and whether those are big-endian."""
    if data[:4] == ZIP_MAGIC:
        return _read_zip(file, data)
    if data[:1] == b"\x80":
        return (*_read_old(data), False)
    if data[257:262] == b"ustar":
        raise Malformed("is written by a torch before 0.2: save it again with a newer one")
    raise Malformed("is no file that torch.save wrote, or its beginning is damaged")


class _Bounded(io.FileIO):
    """`zipfile` reads the whole directory at once, of whatever size the archive claims."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > LONGEST_DIRECTORY:
            raise Malformed(f"is refused: its directory claims {size:,} bytes")
        return super().read(size) or b""


def _read_zip(file: Path, data: mmap.mmap) -> tuple[Any, dict[str, Span], bool]:
    """The archive that torch.save writes since 1.6. Records are stored, never compressed, so that a
    tensor's bytes are bytes of the file."""
    records = _records(file, data)
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1 or any(name.startswith(f"{roots[0]}code/") for name in records):
        raise Malformed("is no archive of weights that torch.save wrote (TorchScript, or another)")
    prefix, pickle = f"{roots[0]}data/", records[f"{roots[0]}data.pkl"]
    if pickle.nbytes > LONGEST_PICKLE:
        raise Malformed("is refused: its pickle is larger than any list of tensors")
    order = records.get(f"{roots[0]}byteorder")
    if order is not None and (order.nbytes > 6 or order.of(data) not in (b"little", b"big")):
        raise Malformed("is damaged: its byte order is neither little nor big")
    storages = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    value, _ = load(pickle.of(data), 0, ADMITTED, storage)
    return value, storages, order is not None and order.of(data) == b"big"


def _records(file: Path, data: mmap.mmap) -> dict[str, Span]:
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


def _span(data: mmap.mmap, entry: zipfile.ZipInfo) -> Span:
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
    if local[:4] != ZIP_MAGIC or raw.decode(encoding, "replace") != name:
        raise Malformed(_BROKEN)
    return Span(begin, size)


def _read_old(data: mmap.mmap) -> tuple[Any, dict[str, Span]]:
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
    spans: dict[str, Span] = {}
    for key in order:
        place = storages[key]
        spans[key] = Span(at + 8, place.nbytes)
        sound = int.from_bytes(data[at : at + 8], "little") == place.count
        at += 8 + place.nbytes
        if not sound or at > len(data):
            raise Malformed(_BROKEN)
    return value, spans
