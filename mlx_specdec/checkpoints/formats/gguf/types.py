"""Element types of GGUF files; the gguf package expands the quantized ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...tensors import Malformed, to_mlx

_PLAIN = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": "u2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
}
"""Types that are not quantized -> how numpy reads their bytes, whatever the byte order."""


@dataclass(frozen=True)
class ElementType:
    """One type. A row is a whole number of blocks of `block` elements in `nbytes` bytes.

    stored: what its values become, a key of `tensors.ELEMENTS`. numpy: "" for quantized types.
    """

    kind: Any
    block: int
    nbytes: int

    @property
    def name(self) -> str:
        return str(self.kind.name)

    @property
    def numpy(self) -> str:
        return _PLAIN.get(self.name, "")

    @property
    def stored(self) -> str:
        return self.name if self.numpy and self.name != "F64" else "F32"


@cache
def element_type(number: int) -> ElementType:
    """A type by ggml's number. Raises Malformed, with its name, for one that cannot be expanded."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        known = ElementType(kind, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise Malformed(
            f"holds tensors of ggml's type {number}, which the gguf package does not know"
        ) from None
    try:
        expand(np.zeros((1, known.nbytes), np.uint8), known, False)
    except NotImplementedError:
        raise Malformed(f"holds {known.name}, which the gguf package cannot expand") from None
    return known


def expand(raw: np.ndarray[Any, Any], kind: ElementType, big_endian: bool) -> mx.array:
    """Rows of bytes, shape (..., bytes of a row), -> their values, shape (..., elements)."""
    raw = np.ascontiguousarray(raw)
    if kind.numpy:
        return to_mlx(raw.view((">" if big_endian else "<") + kind.numpy), kind.stored)
    from gguf.quants import dequantize

    # What overflows is not finite, and whoever wants weights refuses that.
    with np.errstate(all="ignore"):
        return mx.array(dequantize(raw, kind.kind))
