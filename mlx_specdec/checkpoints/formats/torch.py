"""One file that torch.save wrote, zip archive or older stream, as named tensors, without torch. Of
its pickle only plain values are made, and records of tensors by the names in ADMITTED."""

import io
import math
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import tensors
from ..disk import open_map
from ..tensors import Contents, Malformed, Reader, TensorInfo

MOST_AXES = 16
LONGEST_PICKLE = 1 << 26
MOST_STEPS = 2_000_000
"""Of a pickle, about 40 a tensor; each leaves at most some 100 bytes."""


@dataclass(frozen=True)
class Kind:
    """An element type. numpy: how its bytes are read, as integers where numpy lacks the type;
    stored: its name in a safetensors file."""

    numpy: str
    stored: str

    @property
    def size(self) -> int:
        return int(self.numpy[1:])


@dataclass(frozen=True)
class Storage:
    """A run of `count` elements in the file."""

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


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a state dict by name; the rest is passed over. Raises Malformed."""
    outer = value if isinstance(value, dict) else {}
    inner = (outer.get(key) for key in ("state_dict", "model"))
    entries = next((each for each in inner if isinstance(each, dict)), outer)
    found = {name: each for name, each in entries.items() if isinstance(each, Tensor)}
    for name in found:
        tensors.check_name(name)
    if not found:
        raise Malformed("holds no state dict: tensors with names are needed")
    return found


def storage(identity: Any) -> Storage:
    if not (type(identity) is tuple and len(identity) in (5, 6) and identity[0] == "storage"):
        raise Malformed("is damaged or no state dict: its pickle refers to what is no storage")
    _, kind, key, _, count, *view = identity
    sound = isinstance(kind, Kind) and type(key) is str and _is_size(count)
    _check(sound and view in ([], [None]), "storage")
    return Storage(key, kind, count)


def _rebuild_tensor(place: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    kind = getattr(place, "kind", None)
    return _rebuild_tensor_of_type(place, offset, shape, strides, None, None, kind, *rest[2:])


def _rebuild_tensor_of_type(
    place: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Tensor:
    _, _, kind, *marks = rest
    if any(marks):
        raise Malformed("holds a tensor that is marked as negated or conjugated: not read here")
    of_types = isinstance(kind, Kind) and isinstance(place, Storage)
    _check(of_types and type(shape) is type(strides) is tuple, "tensor")
    sized = all(_is_size(number) for number in (offset, *shape, *strides))
    fits = max(shape, default=0) <= tensors.LARGEST_EXTENT
    _check(sized and fits and len(shape) == len(strides) <= MOST_AXES, "tensor")
    if math.prod(shape):
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if (offset + last + 1) * kind.size > place.nbytes:
            raise Malformed("is damaged: a tensor reaches beyond its storage")
    return Tensor(place, kind, offset, shape, strides)


def _rebuild_from_type(function: Any, _: Any, arguments: Any, _attributes: Any) -> Any:
    _check(function in _BUILDERS.values() and type(arguments) is tuple, "tensor")
    return function(*arguments)


def _ordered_dict(pairs: Any = ()) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        _fill(entries, [key, value])
    return entries


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
"""torch's name, that of its class of storages, and that of a safetensors file."""
KINDS = {
    name: Kind("f8" if name == "float64" else tensors.ELEMENTS[stored][1], stored)
    for name, _, stored in _TYPES
}
_MENTION = object()
"""A class that is only mentioned: torch.Tensor, torch.nn.Parameter."""
_BUILDERS = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_of_type,
}
ADMITTED: Mapping[tuple[str, str], Any] = {
    **_BUILDERS,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): lambda extents: _of_type(tuple, extents),
    ("torch", "device"): lambda *_: None,
    **{("torch", name): KINDS[kind] for kind, name, _ in _TYPES if name},
    ("torch", "UntypedStorage"): KINDS["uint8"],
    ("torch.storage", "UntypedStorage"): KINDS["uint8"],
    **{("torch", name): kind for name, kind in KINDS.items()},
    ("torch", "Tensor"): _MENTION,
    ("torch.nn.parameter", "Parameter"): _MENTION,
}
"""Every name that a pickle may use, (module, name) -> what it gets."""


def load(
    data: mmap.mmap, begin: int, persistent: Callable[[Any], Any] = storage
) -> tuple[Any, int]:
    """The value of the pickle that begins at `begin`, of plain values and what ADMITTED and
    `persistent` give, and where it ends. Raises Malformed."""
    stream = io.BytesIO(data[begin : begin + LONGEST_PICKLE])
    try:
        return _interpret(stream, persistent), begin + stream.tell()
    except (LookupError, TypeError, ValueError):
        raise Malformed("is truncated or damaged in its pickle: download it again") from None


_MADE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_PUSHED = ("BININT", "LONG1", "BINFLOAT", "BINUNICODE", "BINSTRING", "BINBYTES", "SHORT_BIN")
"""So begin the operations that push their argument; Python 2's texts are read as latin-1."""
_TAKE = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
"""How many values an operation takes that needs no mark."""
_PLAIN = (str, int, float, bytes, type(None))


def _interpret(stream: io.BytesIO, persistent: Callable[[Any], Any]) -> Any:
    steps = 0
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def taken(name: str) -> list[Any]:
        begin = len(stack) - _TAKE[name] if name in _TAKE else marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    argument: Any
    for operation, argument, _ in pickletools.genops(stream):
        steps += 1
        if steps > MOST_STEPS:
            raise Malformed(f"is refused: its pickle has more than {MOST_STEPS:,} operations")
        match operation.name:
            case name if name in _MADE:
                stack.append(_MADE[name]())
            case name if name.startswith(_PUSHED):
                stack.append(argument)
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(taken(operation.name)))
            case "APPEND" | "APPENDS":
                items = taken(operation.name)
                _of_type(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = taken(operation.name)
                _fill(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_named(module, name))
            case "REDUCE":
                arguments = _of_type(tuple, stack.pop())
                # One list may be handed to many calls, each of which may copy it.
                steps += sum(len(each) for each in arguments if isinstance(each, list | tuple))
                stack[-1] = stack[-1](*arguments)
            case "BUILD":  # metadata of a dictionary, which nobody needs
                if not (isinstance(stack.pop(), dict) and type(stack[-1]) is dict):
                    raise Malformed("is damaged: its pickle sets the state of an object")
            case "BINPERSID":
                stack.append(persistent(stack.pop()))
            case "STOP":
                if len(stack) != 1 or marks:
                    raise Malformed("is damaged: its pickle ends in the middle of a value")
            case "PROTO" if argument in range(2, 6):
                pass
            case name if name != "FRAME":
                raise Malformed(f"uses the pickle operation {name}: not read here")
    return stack[0]


def _named(module: Any, name: Any) -> Any:
    if (module, name) not in ADMITTED:
        shown = ascii(f"{module}.{name}")[1:-1]
        raise Malformed(f"is refused: it asks for {shown:.120}, which is not read here")
    return ADMITTED[module, name]


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    return value


def _fill(entries: Any, items: list[Any]) -> None:
    # Hashing a deeply nested tuple would overrun the interpreter's stack.
    if not all(isinstance(key, _PLAIN) for key in items[::2]):
        raise Malformed("is refused: its pickle has a dictionary key that is no plain value")
    _of_type(dict, entries).update(zip(items[::2], items[1::2], strict=True))


ZIP_MAGIC = b"PK\x03\x04"
OLD_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_BYTES, _ENCRYPTED = 30, 0x1
_BROKEN = "is truncated or damaged: download it again"


class TorchFile(Reader):
    """The tensors of one file, tied ones under each of their names."""

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
            self.infos = {name: self._info(name, each) for name, each in self._tensors.items()}

    @property
    def contents(self) -> Contents:
        first: dict[Tensor, str] = {}
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
        begins, strides = offset * kind.size, tuple(each * kind.size for each in tensor.strides)
        dtype = np.dtype(f"{self._order}{kind.numpy}")
        values = np.ndarray(shape, dtype, self._data, span.start + begins, strides)
        return tensors.to_mlx(values, kind.stored)

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
    order = data[records.get(f"{roots[0]}byteorder", slice(0))][:7]
    if order not in (b"", b"little", b"big"):
        raise Malformed("is damaged: its byte order is neither little nor big")
    storages = {n.removeprefix(prefix): s for n, s in records.items() if n.startswith(prefix)}
    return load(data, pickle.start)[0], storages, ">" if order == b"big" else "<"


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
        # The header has the lengths of what follows it: the record's name and an extra field.
        header = data[at : at + _LOCAL_BYTES].ljust(_LOCAL_BYTES)
        begin = at + _LOCAL_BYTES + sum(struct.unpack_from("<2H", header, 26))
        if header[:4] != ZIP_MAGIC or begin + size > len(data):
            raise Malformed(f"is truncated or damaged in {shown}: download it again")
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
    for _ in ("version", "sizes of this machine's types"):
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
