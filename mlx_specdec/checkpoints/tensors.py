"""Tensors by name, not read yet: their types and shapes now, their values piece by piece."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .disk import drop_pages

PIECE_BYTES = 1 << 22
"""What is worked on at once; a piece and its copies are all that a conversion holds in memory."""


@dataclass(frozen=True)
class Tensor:
    """rows: gives entries begin .. end - 1 along the first axis, the whole of a scalar."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    rows: Callable[[int, int], mx.array]

    @classmethod
    def of(cls, array: mx.array) -> Self:
        """Wrap an array, which may be computed as a whole when its first rows are read."""
        return cls(
            array.dtype, array.shape, lambda begin, end: array[begin:end] if array.ndim else array
        )

    @property
    def size(self) -> int:
        return self.outline.size

    @property
    def nbytes(self) -> int:
        return self.outline.nbytes

    @property
    def outline(self) -> mx.array:
        """A lazy array of this type and shape."""
        return mx.zeros(self.shape, dtype=self.dtype)

    def pieces(self, nbytes: int = PIECE_BYTES) -> Iterator[tuple[int, mx.array]]:
        """All rows in order, in pieces of about `nbytes`, each with the number of its first row."""
        extent = self.shape[0] if self.shape else 1
        step = max(1, nbytes * extent // max(1, self.nbytes))
        for begin in range(0, extent, step):
            yield begin, self.rows(begin, min(begin + step, extent))
            drop_pages()


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape and values."""
    return first.shape == second.shape and all(
        mx.array_equal(piece, second.rows(begin, begin + (piece.shape[0] if piece.ndim else 1)))
        for begin, piece in first.pieces()
    )


def dtype_name(dtype: mx.Dtype) -> str:
    """For example "bfloat16"."""
    return str(dtype).rpartition(".")[2]


LARGEST_EXTENT = 2**31 - 1
MOST_LAYERS = 1_000
"""Of a stack; more would only build for minutes."""
LONGEST_NAME = 1000
ELEMENTS: Mapping[str, tuple[mx.Dtype, str]] = {
    "BOOL": (mx.bool_, "u1"),
    "U8": (mx.uint8, "u1"),
    "I8": (mx.int8, "i1"),
    # MLX has no such type; its reader hands out the bytes, and mlx-lm's models know them.
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
"""Element type as safetensors writes it -> what MLX has for it, and how numpy reads its bytes."""
DTYPES = {name: dtype for name, (dtype, _) in ELEMENTS.items()}


class Malformed(Exception):
    """The rest of a sentence that begins with the file's name: "is truncated: get it again"."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Raises CheckpointError about `file` where the block raises Malformed."""
    try:
        yield
    except Malformed as problem:
        raise CheckpointError(f"{file} {problem}") from None


def check_name(name: object, what: str = "a tensor") -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise Malformed(f"is damaged: {what} is called {shortened(name)}")


def shortened(value: object) -> str:
    """A value of a file in at most 60 characters, all of them harmless."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_mlx(values: np.ndarray, stored: str) -> mx.array:
    """A copy of `values`, in either byte order, with any strides, perhaps integers with the bits of
    other types, as MLX has the type `stored`, a key of ELEMENTS."""
    native = np.asarray(values, values.dtype.newbyteorder("="), order="C")
    if stored == "BOOL":
        return mx.array(native.astype(np.bool_))
    if stored == "F32":
        # Too large for float32, or no number: whoever wants weights refuses it.
        with np.errstate(over="ignore", invalid="ignore"):
            return mx.array(native.astype(np.float32, copy=False))
    array = mx.array(native)
    return array.view(mx.bfloat16) if stored == "BF16" else array


@dataclass(frozen=True)
class TensorInfo:
    """Type and shape of one tensor. dtype: as safetensors writes it, for example "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Self:
        return cls(dtype, shape, math.prod(shape) * DTYPES[dtype].size)

    @property
    def extent(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Contents:
    """The tensors of files under the names and types that these have.

    origins: The name that a reader gives -> the name in the file. If the reader makes a quantized
        matrix of one tensor, only the matrix's weight is here.
    tied: A name that the reader leaves out -> the tensor with the same values.
    dropped: Another name that the reader leaves out -> why.
    shared: A name -> an earlier one that has the same bytes of the file.
    """

    stored: Mapping[str, TensorInfo]
    origins: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)


class TensorReader(ABC):
    """The tensors of one file, or of one model in several parts. Made from a path, which raises
    CheckpointError. infos: every tensor that is handed out, from headers alone."""

    paths: tuple[Path, ...]
    infos: Mapping[str, TensorInfo]

    @abstractmethod
    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 along the first axis, or a scalar; nothing else is read."""

    @property
    def contents(self) -> Contents:
        """The tensors under the file's names and types, with those that are not handed out."""
        return Contents(self.infos, {name: name for name in self.infos})

    def tensor(self, name: str) -> Tensor:
        """One tensor, to be read in pieces."""
        info = self.infos[name]
        return Tensor(DTYPES[info.dtype], info.shape, partial(self.rows, name))


def check_weights(
    expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError for the first tensor missing, left over, or of another shape."""
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if names := missing or extra:
        problem = "is missing" if missing else "is not part of the model that config.json describes"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(f"weight {names[0]} {problem}{more}: download the model again")
    for name in sorted(expected):
        if expected[name] != given[name]:
            raise CheckpointError(
                f"weight {name} has shape {given[name]} where config.json asks for {expected[name]}"
            )
