"""Torch archives made by hand: the few that real torch does not write, and hostile ones."""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

OLD_MAGIC = 0x1950A86A20F9469CFC6C
"""The number with which the older streams of torch begin."""
CLASSES = {
    mx.float32: "FloatStorage",
    mx.float16: "HalfStorage",
    mx.bfloat16: "BFloat16Storage",
    mx.int32: "IntStorage",
}


@dataclass(frozen=True)
class Name:
    """Something that a pickle imports."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A name called with arguments."""

    name: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Persistent:
    """A persistent id."""

    value: Any


def encode(value: Any) -> bytes:
    """The operations that build a value, protocol 2."""
    if isinstance(value, Name):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Call):
        return encode(value.name) + encode(value.arguments) + b"R"
    if isinstance(value, Persistent):
        return encode(value.value) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(encode, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(encode, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(encode(k) + encode(v) for k, v in value.items()) + b"u"
    return pickle.dumps(value, protocol=2)[2:-1]


def pickled(value: Any) -> bytes:
    """A whole pickle."""
    return b"\x80\x02" + encode(value) + b"."


def tensor(
    key: str = "0",
    count: Any = 6,
    offset: Any = 0,
    shape: Any = (2, 3),
    strides: Any = (3, 1),
    storage: str = "FloatStorage",
    old: bool = False,
) -> Call:
    """A tensor as torch describes it."""
    place = ("storage", Name("torch", storage), key, "cpu", count, *((None,) if old else ()))
    hooks = Call(Name("collections", "OrderedDict"))
    return Call(
        Name("torch._utils", "_rebuild_tensor_v2"),
        (Persistent(place), offset, shape, strides, False, hooks),
    )


def write_zip(
    file: Path,
    value: Any,
    storages: Mapping[str, bytes] | None = None,
    *,
    records: Mapping[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> Path:
    """An archive that holds any pickle at all; value: to be encoded, or the pickle's bytes."""
    text = value if isinstance(value, bytes) else pickled(value)
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x/data.pkl", text)
        for key, data in (storages or {}).items():
            archive.writestr(f"x/data/{key}", data)
        for name, data in (records or {"x/version": b"3\n"}).items():
            archive.writestr(name, data)
    return file


def write_old(file: Path, value: Any, storages: Mapping[str, tuple[int, bytes]]) -> Path:
    """The older stream; storages: key -> how many elements it claims, and its bytes."""
    text = value if isinstance(value, bytes) else pickled(value)
    head = pickled(OLD_MAGIC) + pickled(1001) + pickled({"little_endian": True})
    tail = b"".join(struct.pack("<q", count) + data for count, data in storages.values())
    file.write_bytes(head + text + pickled(list(storages)) + tail)
    return file


def save_torch(file: Path, weights: Mapping[str, mx.array]) -> Path:
    """Weights as torch.save would write them."""
    value: dict[str, Any] = {}
    storages: dict[str, bytes] = {}
    for number, (name, array) in enumerate(weights.items()):
        strides = [1]
        for extent in reversed(array.shape[1:]):
            strides.insert(0, strides[0] * extent)
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        storages[str(number)] = np.array(bits).tobytes()
        value[name] = tensor(
            str(number),
            array.size,
            shape=tuple(array.shape),
            strides=tuple(strides[: array.ndim]),
            storage=CLASSES[array.dtype],
        )
    return write_zip(file, value, storages)
