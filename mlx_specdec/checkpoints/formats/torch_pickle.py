"""The pickle that torch.save writes, interpreted here: plain values, and records of tensors by the
names in ADMITTED. Nothing else is made or run."""

from __future__ import annotations

import math
import mmap
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..tensors import ELEMENTS, LARGEST_EXTENT, Malformed, check_name

MOST_AXES = 16
LONGEST_PICKLE = 1 << 26
MOST_READS = 2_000_000
"""Of operations and their arguments, about 60 a tensor; each leaves at most some 100 bytes."""
INNER = ("state_dict", "model")
"""Keys under which a training program may have put the state dict."""


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
    entries = next((outer[key] for key in INNER if isinstance(outer.get(key), dict)), outer)
    tensors = {name: each for name, each in entries.items() if isinstance(each, Tensor)}
    for name in tensors:
        check_name(name)
    if not tensors:
        raise Malformed("holds no state dict: tensors with names are needed")
    return tensors


# The functions below get whatever a pickle has; `load` turns what Python raises into Malformed.


def storage(identity: Any) -> Storage:
    """The storage that a persistent id stands for. Raises Malformed."""
    if not (type(identity) is tuple and len(identity) in (5, 6) and identity[0] == "storage"):
        raise Malformed("is damaged or no state dict: its pickle refers to what is no storage")
    _, kind, key, _, count, *view = identity
    _check(isinstance(kind, Kind) and type(key) is str and _is_size(count), "storage")
    if view not in ([], [None]):
        raise Malformed("is written by a torch before 0.4: save it again with a newer one")
    return Storage(key, kind, count)


def _rebuild_tensor(place: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    kind = getattr(place, "kind", None)
    return _rebuild_tensor_of_type(place, offset, shape, strides, None, None, kind, *rest[2:])


def _rebuild_tensor_of_type(
    place: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    kind: Any,
    *marks: Any,
) -> Tensor:
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


def _rebuild_from_type(function: Any, named: Any, arguments: Any, _attributes: Any) -> Any:
    sound = function in _BUILDERS.values() and type(arguments) is tuple and named is _MENTION
    _check(sound, "tensor")
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
    name: Kind("f8" if name == "float64" else ELEMENTS[stored][1], stored)
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
    data: bytes | mmap.mmap, begin: int, persistent: Callable[[Any], Any] = storage
) -> tuple[Any, int]:
    """The value of the pickle that begins at `begin`, of plain values and what ADMITTED and
    `persistent` give, and where it ends. Raises Malformed."""
    source = _Source(data, begin)
    try:
        return _interpret(source, persistent), source.at
    except (LookupError, TypeError, ValueError):
        raise Malformed("is truncated or damaged in its pickle: download it again") from None


class _Source:
    """A pickle's bytes as `pickletools` asks for them, within limits."""

    def __init__(self, data: bytes | mmap.mmap, begin: int) -> None:
        self._data, self.at, self._end = data, begin, min(len(data), begin + LONGEST_PICKLE)
        self._left = MOST_READS

    def spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise Malformed(f"is refused: its pickle has more than {MOST_READS:,} operations")

    def read(self, size: int) -> bytes:
        self.spend(1)
        if size > self._end - self.at:
            raise ValueError("the pickle ends early")
        self.at += size
        return self._data[self.at - size : self.at]

    def readline(self) -> bytes:
        stop = self._data.find(b"\n", self.at, self._end)
        return self.read(stop + 1 - self.at if stop >= 0 else LONGEST_PICKLE)


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
_PLAIN = (str, int, float, bytes, type(None))


def _interpret(source: _Source, persistent: Callable[[Any], Any]) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    argument: Any
    for operation, argument, _ in pickletools.genops(source):  # type: ignore[arg-type]
        match operation.name:
            case name if name in _MADE:
                stack.append(_MADE[name]())
            case name if name.startswith(_PUSHED):
                stack.append(argument)
            case "MARK":
                marks.append(len(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(operation.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND" | "APPENDS":
                items = since_mark() if operation.name == "APPENDS" else [stack.pop()]
                _of_type(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = (
                    since_mark() if operation.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                )
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
                source.spend(sum(len(each) for each in arguments if isinstance(each, list | tuple)))
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
    if (module, name) in ADMITTED:
        return ADMITTED[module, name]
    shown = ascii(f"{module}.{name}")[1:-1]
    raise Malformed(f"is refused: it asks for {shown:.120}, which is not read here")


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    return value


def _fill(entries: Any, items: list[Any]) -> None:
    # Hashing a deeply nested tuple would overrun the interpreter's stack.
    if not all(isinstance(key, _PLAIN) for key in items[::2]):
        raise Malformed("is refused: its pickle has a dictionary key that is no plain value")
    _of_type(dict, entries).update(zip(items[::2], items[1::2], strict=True))
