"""Matrices of 8-bit floats (E4M3) with one factor per block of 128 x 128 weights, as DeepSeek and
Qwen publish them. The factors of a tensor are stored under the tensor's name plus SUFFIX."""

from collections.abc import Mapping

import mlx.core as mx

from .tensors import TensorInfo

SUFFIX = "_scale_inv"
BLOCK = 128
"""Rows and columns of one block, the same in all published models."""


def factors_of(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the name of every matrix that has factors -> the name of the factors."""
    return {
        name: f"{name}{SUFFIX}"
        for name, info in infos.items()
        if info.dtype == "F8_E4M3"
        and f"{name}{SUFFIX}" in infos
        and len(info.shape) > 1
        and infos[f"{name}{SUFFIX}"].shape == _blocks(info.shape)
    }


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def dequantize(weight: mx.array, factors: mx.array, first: int = 0) -> mx.array:
    """Return the values of some rows of a matrix, lazily.

    Args:
        weight: E4M3 as uint8, shape (..., rows, columns).
        factors: The factors of the blocks that hold the rows.
        first: The position of the first row in its block.

    Returns:
        The values in bfloat16, as computed by the code that DeepSeek publishes.
    """
    values = mx.from_fp8(weight, dtype=mx.float32)
    rows = (mx.arange(weight.shape[-2]) + first) // BLOCK
    columns = mx.arange(weight.shape[-1]) // BLOCK
    spread = mx.take(mx.take(factors.astype(mx.float32), rows, axis=-2), columns, axis=-1)
    return (values * spread).astype(mx.bfloat16)
