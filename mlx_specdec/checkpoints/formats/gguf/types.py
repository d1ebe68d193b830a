"""Element types of GGUF files: what each takes of a file, and its bytes -> arrays.

Knows the plain types; the packed ones, which are many and grow in number, are expanded by the gguf
package. Knows nothing of files or names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...disk.mapped import to_mlx
from .header import Damaged


@dataclass(frozen=True)
class ElementType:
    """One type. A row is a whole number of blocks of `block` elements in `nbytes` bytes.

    stored: what its values become, a key of `safetensors_file.DTYPES`; F32 for packed types.
    numpy: how numpy calls it, without the byte order; "" for packed types.
    """

    number: int
    name: str
    block: int
    nbytes: int
    stored: str
    numpy: str = ""


_PLAIN = {
    0: ElementType(0, "F32", 1, 4, "F32", "f4"),
    1: ElementType(1, "F16", 1, 2, "F16", "f2"),
    24: ElementType(24, "I8", 1, 1, "I8", "i1"),
    25: ElementType(25, "I16", 1, 2, "I16", "i2"),
    26: ElementType(26, "I32", 1, 4, "I32", "i4"),
    27: ElementType(27, "I64", 1, 8, "I64", "i8"),
    28: ElementType(28, "F64", 1, 8, "F32", "f8"),
    30: ElementType(30, "BF16", 1, 2, "BF16", "u2"),
}
_GONE: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that files once had and ggml has no more."""


@cache
def element_type(number: int) -> ElementType:
    """A type by ggml's number. Raises Damaged, with its name, for one that cannot be expanded."""
    if number in _PLAIN:
        return _PLAIN[number]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(number)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        name = _GONE.get(number, f"type number {number}")
        raise Damaged(f"holds {name}, which the gguf package does not know") from None
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except NotImplementedError:
        raise Damaged(f"holds {kind.name}, which the gguf package cannot expand") from None
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
