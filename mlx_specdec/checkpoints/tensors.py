"""A tensor that is not read yet: its type and shape now, its values piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

PIECE_BYTES = 1 << 22
"""What is worked on at once; a piece and its copies are all that a conversion holds in memory."""


@dataclass(frozen=True)
class Tensor:
    """rows: gives entries begin .. end - 1 along the first axis, the whole of a scalar."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    rows: Callable[[int, int], mx.array]

    @classmethod
    def of(cls, array: mx.array) -> Tensor:
        """An array that is there, or will be computed as a whole when first asked for."""
        return cls(
            array.dtype, array.shape, lambda begin, end: array[begin:end] if array.ndim else array
        )

    @property
    def size(self) -> int:
        """How many elements."""
        return self.outline.size

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.outline.nbytes

    @property
    def outline(self) -> mx.array:
        """A lazy array of this type and shape: for finding out types and shapes, not values."""
        return mx.zeros(self.shape, dtype=self.dtype)

    def pieces(self, nbytes: int = PIECE_BYTES) -> Iterator[tuple[int, mx.array]]:
        """All rows in order, in pieces of about `nbytes`, each with the number of its first row.

        Memory holds one piece if the caller lets go of each.
        """
        extent = self.shape[0] if self.shape else 1
        step = max(1, nbytes * extent // max(1, self.nbytes))
        for begin in range(0, extent, step):
            yield begin, self.rows(begin, min(begin + step, extent))


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape and equal values. Stops at the first difference."""
    if first.shape != second.shape:
        return False
    for begin, piece in first.pieces():
        end = begin + (piece.shape[0] if piece.ndim else 1)
        if not mx.array_equal(piece, second.rows(begin, end)).item():
            return False
    return True


def dtype_name(dtype: mx.Dtype) -> str:
    """For example "bfloat16"."""
    return str(dtype).rpartition(".")[2]
