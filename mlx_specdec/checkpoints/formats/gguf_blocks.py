"""Quantized types of GGUF that MLX can represent exactly: affine, in groups of 32 weights. A block
has integers q, a scale d and maybe a minimum m. The values are d * (q - 8) in Q4_0, d * q + m in
Q4_1, and d * q in Q8_0."""

import mlx.core as mx
import numpy as np

from ..quantization import Quantization

EXACT = {"Q4_0": Quantization(4, 32), "Q4_1": Quantization(4, 32), "Q8_0": Quantization(8, 32)}
"""GGUF type -> MLX quantization."""
_ZERO = {"Q4_0": 8, "Q8_0": 128}
"""GGUF type -> the zero point, an unsigned integer that stands for 0. Q4_1 has none."""


def part_of(part: str, kind: str, raw: np.ndarray) -> mx.array:
    """Return one part of a matrix in MLX's layout, with exactly the same values.

    Args:
        part: "weight", "scales" or "biases".
        kind: A key of EXACT.
        raw: The rows' bytes, uint8, shape (..., bytes of a row).

    Returns:
        The weight as uint32, shape (..., columns * bits / 32), or the scales or biases as float16,
        shape (..., columns / 32).
    """
    how = EXACT[kind]
    halves, weights = (2 if kind == "Q4_1" else 1), how.group_size * how.bits // 8
    blocks = raw.reshape(*raw.shape[:-1], -1, 2 * halves + weights)
    if part != "weight":
        stored = np.ascontiguousarray(blocks[..., : 2 * halves]).view("<f2").astype(np.float16)
        if part == "scales" or kind == "Q4_1":
            return mx.array(stored[..., 0 if part == "scales" else 1])
        # Products with a power of two are exact.
        with np.errstate(over="ignore", invalid="ignore"):
            return mx.array(stored[..., 0] * np.float16(-_ZERO[kind]))
    numbers = blocks[..., 2 * halves :]
    if how.bits == 8:
        packed = numbers ^ np.uint8(128)
    else:
        # A byte holds weights i and i + 16 of its block in GGUF, and two neighbors in MLX.
        ordered = np.concatenate([numbers & 15, numbers >> 4], axis=-1)
        packed = ordered[..., ::2] | ordered[..., 1::2] << 4
    rows = np.ascontiguousarray(packed.reshape(*raw.shape[:-1], -1))
    return mx.array(rows.view("<u4").astype(np.uint32))
