"""Tensors of files: dtypes and shapes from headers, and values that are read when needed."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError


@dataclass(frozen=True)
class Tensor:
    """A tensor that is not read yet. read: Returns the array, which may be lazy."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    read: Callable[[], mx.array]

    @classmethod
    def of(cls, array: mx.array) -> Self:
        """Wrap an array, which may be lazy."""
        return cls(array.dtype, array.shape, lambda: array)

    @property
    def size(self) -> int:
        return self.outline.size

    @property
    def nbytes(self) -> int:
        return self.outline.nbytes

    @property
    def outline(self) -> mx.array:
        """A lazy array of the tensor's dtype and shape, for computing sizes."""
        return mx.zeros(self.shape, dtype=self.dtype)


MAY_BE_COPIES = re.compile(r"(^|\.)(lm_head|shared|embed_tokens)\.")
"""Matches the names of embeddings and heads, of which one may repeat another."""


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape and values."""
    return first.shape == second.shape and bool(mx.array_equal(first.read(), second.read()))


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a name such as "bfloat16"."""
    return str(dtype).rpartition(".")[2]


LARGEST_SIZE = 2**31 - 1
"""Largest size of an axis: MLX stores shapes as 32-bit integers."""
MOST_LAYERS = 1_000
"""Most layers of a model. Building the network of a larger number would take minutes."""
LONGEST_NAME = 1000
ELEMENTS: Mapping[str, tuple[mx.Dtype, str]] = {
    "BOOL": (mx.bool_, "u1"),
    "U8": (mx.uint8, "u1"),
    "I8": (mx.int8, "i1"),
    # MLX has no such dtype. It returns the bytes, which mlx-lm's models convert.
    "F8_E4M3": (mx.uint8, "u1"),
    "U16": (mx.uint16, "u2"),
    "I16": (mx.int16, "i2"),
    "F16": (mx.float16, "f2"),
    "BF16": (mx.bfloat16, "u2"),
    "U32": (mx.uint32, "u4"),
    "I32": (mx.int32, "i4"),
    "F32": (mx.float32, "f4"),
    "U64": (mx.uint64, "u8"),
    "I64": (mx.int64, "i8"),
}
"""Element type in safetensors files -> dtype in MLX, and the numpy type that reads its bytes."""
DTYPES = {name: dtype for name, (dtype, _) in ELEMENTS.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F8_E4M3"}
"""Dtype in MLX -> element type in safetensors files."""


class Malformed(Exception):
    """An error whose message is the rest of a sentence that begins with the file's name, such as
    "is truncated: get it again"."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn Malformed in the block into a CheckpointError that names `file`."""
    try:
        yield
    except Malformed as problem:
        raise CheckpointError(f"{file} {problem}") from None


def check_name(name: object, what: str = "a tensor") -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise Malformed(f"is damaged: {what} is called {shortened(name)}")


def shortened(value: object) -> str:
    """Return a value of a file in at most 60 characters of printable ASCII."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_mlx(values: np.ndarray, stored: str) -> mx.array:
    """Copy numpy values, in either byte order and with any strides, into an MLX array. stored: A
    key of ELEMENTS, with the numpy type of the values and the dtype of the array."""
    native = np.asarray(values, values.dtype.newbyteorder("="), order="C")
    if stored == "BOOL":
        return mx.array(native.astype(np.bool_))
    if stored == "F32":
        # Infinite and NaN values are refused later by the code that reads weights.
        with np.errstate(over="ignore", invalid="ignore"):
            return mx.array(native.astype(np.float32, copy=False))
    array = mx.array(native)
    return array.view(mx.bfloat16) if stored == "BF16" else array


@dataclass(frozen=True)
class TensorInfo:
    """Type, shape and size of a tensor. dtype: A name as in safetensors files, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Self:
        return cls(dtype, shape, math.prod(shape) * DTYPES[dtype].size)


class TensorReader(ABC):
    """The tensors of a file, or of a model in several parts. The constructor takes a path, reads
    headers alone, and raises CheckpointError.

    Attributes:
        paths: The files.
        infos: Name -> type and shape of every tensor.
        stored: Name in the file -> type and shape in the file.
        origins: Name in the reader -> name in the file. If the reader makes a quantized matrix of
            one tensor, only the matrix's weight is here.
        tied: Name of a tensor that the reader leaves out -> the tensor with the same values.
        dropped: Name of another tensor that the reader leaves out -> the reason.
        shared: Name of a tensor -> an earlier tensor with the same bytes in the file.
    """

    def __init__(self) -> None:
        self.paths: tuple[Path, ...] = ()
        self.infos: dict[str, TensorInfo] = {}
        self.stored: dict[str, TensorInfo] = {}
        self.origins: dict[str, str] = {}
        self.tied: dict[str, str] = {}
        self.dropped: dict[str, str] = {}
        self.shared: dict[str, str] = {}

    @abstractmethod
    def read(self, name: str) -> mx.array:
        """Return a tensor, which may be lazy."""

    def note(self) -> str:
        """Return a sentence for the user about tensors that were changed when they were read."""
        return ""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is read later."""
        info = self.infos[name]
        return Tensor(DTYPES[info.dtype], info.shape, partial(self.read, name))


_NAME_PARTS = re.compile(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", re.DOTALL)


def by_layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensors that differ in the layer alone. Return a name such as
    "model.layers.{0,1}.mlp.gate.weight" -> the names in the group."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        before, number, after = _NAME_PARTS.fullmatch(name).groups("")  # type: ignore[union-attr]
        groups.setdefault((before, after), {})[number] = name
    return {
        f"{before}{'{' + ','.join(group) + '}' if len(group) > 1 else next(iter(group))}{after}": [
            *group.values()
        ]
        for (before, after), group in groups.items()
    }


def summary_of(names: Iterable[str]) -> str:
    """List tensors, with layers in one entry; see `by_layers`."""
    return ", ".join(by_layers(names))


UNFIT = (
    "the checkpoint is incomplete, or a version of its format that is not supported yet: compare "
    "its files with the original's, or update mlx-specdec and mlx-lm"
)


def check_weights(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], place: str = ""
) -> None:
    """Raise CheckpointError for a tensor that is missing, superfluous, or has a wrong shape.
    expected, actual: Name -> shape. place: The beginning of the message, such as "FILE: "."""
    missing, extra = (
        sorted(expected.keys() - actual.keys()),
        sorted(actual.keys() - expected.keys()),
    )
    if names := missing or extra:
        problem = "is missing" if missing else "is not part of the model that config.json describes"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(f"{place}weight {names[0]} {problem}{more}: {UNFIT}")
    for name in sorted(expected):
        if expected[name] != actual[name]:
            raise CheckpointError(
                f"{place}weight {name} has shape {actual[name]} where config.json asks for "
                f"{expected[name]}"
            )
