"""Element types of GGUF files: what each takes of a file, and its bytes -> arrays.

The plain types are here; the quantized ones, which are many and grow in number, are expanded by the
gguf package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..reader import Malformed, to_mlx


@dataclass(frozen=True)
class ElementType:
    """One type. A row is a whole number of blocks of `block` elements in `nbytes` bytes.

    stored: what its values become, a key of `safetensors.DTYPES`; F32 for quantized types.
    numpy: how numpy calls it, without the byte order; "" for quantized types.
    """

    number: int
    name: str
    block: int
    nbytes: int
    stored: str
    numpy: str = ""


_PLAIN = {
    number: ElementType(number, name, 1, int(numpy[1]), "F32" if name == "F64" else name, numpy)
    for number, name, numpy in (
        (0, "F32", "f4"),
        (1, "F16", "f2"),
        (24, "I8", "i1"),
        (25, "I16", "i2"),
        (26, "I32", "i4"),
        (27, "I64", "i8"),
        (28, "F64", "f8"),
        (30, "BF16", "u2"),
    )
}


@cache
def element_type(number: int) -> ElementType:
    """A type by ggml's number. Raises Malformed, with its name, for one that cannot be expanded."""
    if number in _PLAIN:
        return _PLAIN[number]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(number)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise Malformed(
            f"holds tensors of ggml's type {number}, which the gguf package does not know"
        ) from None
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except NotImplementedError:
        raise Malformed(f"holds {kind.name}, which the gguf package cannot expand") from None
    return ElementType(number, kind.name, block, nbytes, "F32")


def expand(raw: np.ndarray[Any, Any], kind: ElementType, big_endian: bool) -> mx.array:
    """Rows of bytes, shape (..., bytes of a row), -> their values, shape (..., elements)."""
    if kind.numpy:
        order = ">" if big_endian else "<"
        return to_mlx(np.ascontiguousarray(raw).view(order + kind.numpy), kind.stored)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # What overflows is not finite, and whoever wants weights refuses that.
    with np.errstate(all="ignore"):
        return mx.array(dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(kind.number)))
