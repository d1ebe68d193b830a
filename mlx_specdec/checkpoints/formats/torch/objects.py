"""What a torch state dict is made of: storages, tensors that view them, and how they are named.

Knows which names of torch's a pickle may use (ADMITTED is the whole list) and what each leaves
behind: a record of numbers and texts. Knows nothing of files; no storage is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..safetensors import LARGEST_EXTENT, LONGEST_NAME
from .pickle_machine import Constructor, Refused

MOST_AXES = 16
INNER = ("state_dict", "model")
"""Keys under which a training program may have put the state dict."""


@dataclass(frozen=True)
class Kind:
    """An element type. numpy: how its bytes are read; stored: its name in a safetensors file.

    bfloat16 and float8 are read as integers, which have their bits; float64 becomes float32.
    """

    name: str
    numpy: str
    stored: str

    @property
    def size(self) -> int:
        """Bytes of one element in the file."""
        return int(self.numpy[1:])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("float64", "f8", "F32"),
        Kind("float32", "f4", "F32"),
        Kind("float16", "f2", "F16"),
        Kind("bfloat16", "u2", "BF16"),
        Kind("float8_e4m3fn", "u1", "F8_E4M3"),
        Kind("int64", "i8", "I64"),
        Kind("int32", "i4", "I32"),
        Kind("int16", "i2", "I16"),
        Kind("int8", "i1", "I8"),
        Kind("uint64", "u8", "U64"),
        Kind("uint32", "u4", "U32"),
        Kind("uint16", "u2", "U16"),
        Kind("uint8", "u1", "U8"),
        Kind("bool", "u1", "BOOL"),
    )
}
UNREAD = {
    **{f"float8_{name}": f"float8_{name}" for name in ("e5m2", "e5m2fnuz", "e4m3fnuz", "e8m0fnu")},
    **{name: name for name in ("complex32", "complex64", "complex128")},
    **{name: name for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")},
    "ComplexHalfStorage": "complex32",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}
"""Names in torch of element types that MLX does not have, or that weights are not kept in here."""
_CLASSES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class StorageClass:
    """A class of torch's storages, as a pickle names it."""

    kind: Kind


@dataclass(frozen=True)
class Storage:
    """A run of elements in the archive. count: how many, in elements of `kind`."""

    key: str
    kind: Kind
    count: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.count * self.kind.size


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count elements of `kind`, not bytes."""

    storage: Storage
    kind: Kind
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Named:
    """A class that is only mentioned: torch.Tensor, torch.nn.Parameter."""

    name: str


def storage(identity: Any) -> Storage:
    """The storage that a persistent id stands for. Raises Refused."""
    if not (type(identity) is tuple and len(identity) in (5, 6) and identity[0] == "storage"):
        raise Refused("is damaged or no state dict: its pickle refers to what is no storage")
    _, kind, key, _, count = identity[:5]
    if not isinstance(kind, StorageClass) or type(key) is not str or not _is_size(count):
        raise Refused("is damaged: its pickle describes a storage wrongly")
    if len(identity) == 6 and identity[5] is not None:
        raise Refused("is written by a torch before 0.4: save it again with a newer one")
    return Storage(key, kind.kind, count)


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a state dict by name; what else lies in it is passed over. Raises Refused."""
    if isinstance(value, dict):
        for key in INNER:
            if isinstance(value.get(key), dict):
                value = value[key]
                break
    if not isinstance(value, dict):
        raise Refused("holds no state dict: tensors with names are needed")
    found = {name: each for name, each in value.items() if isinstance(each, Tensor)}
    for name in found:
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise Refused(f"is damaged: a tensor is called {name!a:.60}")
    if not found:
        raise Refused("holds no state dict: tensors with names are needed")
    return found


def _rebuild_tensor(arguments: tuple[Any, ...]) -> Tensor:
    """Of (storage, offset, shape, strides, requires_grad, hooks, marks)."""
    if len(arguments) < 4:
        raise Refused("is damaged: its pickle describes a tensor wrongly")
    _check_marks(arguments[6:])
    kind = arguments[0].kind if isinstance(arguments[0], Storage) else None
    return _tensor(kind, *arguments[:4])


def _rebuild_tensor_of_type(arguments: tuple[Any, ...]) -> Tensor:
    """Of (storage, offset, shape, strides, requires_grad, hooks, type, marks)."""
    if len(arguments) < 7:
        raise Refused("is damaged: its pickle describes a tensor wrongly")
    _check_marks(arguments[7:])
    return _tensor(arguments[6], *arguments[:4])


def _check_marks(rest: tuple[Any, ...]) -> None:
    if any(rest):
        raise Refused("holds a tensor that is marked as negated or conjugated: not read here")


def _tensor(kind: Any, place: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    sound = (
        isinstance(kind, Kind)
        and isinstance(place, Storage)
        and _is_size(offset)
        and type(shape) is tuple
        and type(strides) is tuple
        and len(shape) == len(strides) <= MOST_AXES
        and all(_is_size(number) for number in (*shape, *strides))
        and all(extent <= LARGEST_EXTENT for extent in shape)
    )
    if not sound:
        raise Refused("is damaged: its pickle describes a tensor wrongly")
    if math.prod(shape):
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if (offset + last + 1) * kind.size > place.nbytes:
            raise Refused("is damaged: a tensor reaches beyond its storage")
    return Tensor(place, kind, offset, shape, strides)


def _rebuild_parameter(arguments: tuple[Any, ...]) -> Tensor:
    if not arguments or not isinstance(arguments[0], Tensor):
        raise Refused("is damaged: its pickle describes a parameter wrongly")
    return arguments[0]


def _rebuild_from_type(arguments: tuple[Any, ...]) -> Any:
    """Of (function, class, its arguments, attributes): a tensor that was given attributes."""
    if len(arguments) != 4 or not isinstance(arguments[1], _Named):
        raise Refused("is damaged: its pickle describes a tensor wrongly")
    function, _, inner, _ = arguments
    if function not in _BUILDERS or type(inner) is not tuple:
        raise Refused("is damaged: its pickle describes a tensor wrongly")
    return function.call(inner)


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if not arguments:
        return {}
    pairs = arguments[0] if len(arguments) == 1 else None
    if type(pairs) is not list or not all(
        type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
    ):
        raise Refused("is damaged: its pickle describes a dictionary wrongly")
    return dict(pairs)


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) != 1 or type(arguments[0]) not in (tuple, list):
        raise Refused("is damaged: its pickle describes a size wrongly")
    return tuple(arguments[0])


def _device(arguments: tuple[Any, ...]) -> None:
    return None


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**62


_BUILDERS = (
    Constructor("torch._utils._rebuild_tensor", _rebuild_tensor),
    Constructor("torch._utils._rebuild_tensor_v2", _rebuild_tensor),
    Constructor("torch._utils._rebuild_tensor_v3", _rebuild_tensor_of_type),
)
_CONSTRUCTORS = (
    *_BUILDERS,
    Constructor("torch._utils._rebuild_parameter", _rebuild_parameter),
    Constructor("torch._utils._rebuild_parameter_with_state", _rebuild_parameter),
    Constructor("torch._tensor._rebuild_from_type_v2", _rebuild_from_type),
    Constructor("collections.OrderedDict", _ordered_dict),
    Constructor("torch.Size", _size),
    Constructor("torch.device", _device),
)
ADMITTED: Mapping[tuple[str, str], Any] = {
    **{tuple(each.name.rsplit(".", 1)): each for each in _CONSTRUCTORS},  # type: ignore[misc]
    **{("torch", name): StorageClass(KINDS[kind]) for name, kind in _CLASSES.items()},
    ("torch.storage", "UntypedStorage"): StorageClass(KINDS["uint8"]),
    **{("torch", name): kind for name, kind in KINDS.items()},
    ("torch", "Tensor"): _Named("Tensor"),
    ("torch.nn.parameter", "Parameter"): _Named("Parameter"),
}
"""Every name that a pickle may use. Calling one builds a record here and runs nothing of torch."""
