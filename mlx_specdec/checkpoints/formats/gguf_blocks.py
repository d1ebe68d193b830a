"""GGUF's quantized types in MLX's affine format. A weight is q * scale + bias there, and a group of
32 weights has one scale and one bias.

Layouts of blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Groups of
Q2_K, Q3_K and Q6_K have 16 weights, so pairs of groups are joined, with a finer scale for both. The
integers of the other types stay as they are. Scales and biases of K types are rounded to float16,
by at most 0.05 % (2**-11). The other types have float16 in the file too."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..quantization import ALL_PARTS, Quantization

Array = np.ndarray[Any, Any]
GROUP = 32
"""Number of weights that share a scale in MLX."""
CHUNK_BYTES = 1 << 16
"""Bytes of blocks that are converted at a time, so that NumPy's arrays stay in the CPU's cache."""


@dataclass(frozen=True)
class Field:
    """Integers in a block. In each chunk of `width` bytes, the lowest bits of the bytes come first,
    and the highest bits come last. Integers of 8 bits are signed. Integers of 6 bits are the
    factors of Q4_K and Q5_K: 8 for the scale, then 8 for the minimum.

    Attributes:
        begin, nbytes: The position and the number of bytes.
        bits: Bits of an integer.
    """

    begin: int
    nbytes: int
    bits: int
    width: int

    def read(self, blocks: Array) -> Array:
        """Return the integers, and signed ones plus 128, as uint8: (blocks, bytes) -> (blocks,
        integers)."""
        part = blocks[:, self.begin : self.begin + self.nbytes]
        if self.bits == 8:
            return part ^ np.uint8(128)
        if self.bits == 6:
            from gguf.quants import Q4_K

            return np.concatenate(Q4_K.get_scale_min(np.ascontiguousarray(part)), axis=-1)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        chunks = part.reshape(len(blocks), -1, 1, self.width)
        return (chunks >> shifts & np.uint8((1 << self.bits) - 1)).reshape(len(blocks), -1)


@dataclass(frozen=True)
class BlockType:
    """A quantized type. A weight is (integer - zero) * scale + minimum.

    Attributes:
        bits: Bits of a weight in MLX.
        nbytes: Bytes of a block.
        integers: The fields whose bits make up the weights' integers, the lowest bits first.
        zero: The integer that stands for 0.
        scale: The position of the block's scale, a float16.
        minimum: The position of the block's minimum, a float16, or None.
        factors: The fields of the factors by which groups multiply the block's scale. If there is a
            minimum, its negative factors follow. () means that the block is one group.
        factor_zero: The factor that stands for 0.
        finer: The larger scale of two groups divided by the scale of the joined group; 0 if groups
            are not joined. A joined group with a wide range gets a larger scale.
    """

    bits: int
    nbytes: int
    integers: tuple[Field, ...]
    zero: int = 0
    scale: int = 0
    minimum: int | None = None
    factors: tuple[Field, ...] = ()
    factor_zero: int = 0
    finer: int = 0

    @property
    def top(self) -> int:
        """The largest integer of a weight in a block."""
        return (1 << sum(field.bits for field in self.integers)) - 1

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.bits, GROUP)

    def dequantize(self, raw: Array) -> mx.array:
        """Return the values of rows, float32: (..., bytes of a row) -> (..., columns)."""
        parts, _ = self.decode(raw)
        return self.quantization.dequantize(*map(mx.array, parts.values()))

    def decode(self, raw: Array) -> tuple[dict[str, Array], float]:
        """Return the parts of a matrix in MLX's layout.

        Args:
            raw: The rows' bytes, uint8, shape (..., bytes of a row).

        Returns:
            The "weight" as uint32, shape (..., columns * bits / 32), and the "scales" and "biases"
            as float16, shape (..., columns / 32). Then the largest change of a weight by the
            joining of groups, relative to the larger of their scales.
        """
        blocks, chunk = raw.reshape(-1, self.nbytes), CHUNK_BYTES // self.nbytes
        arrays: list[Array] = []
        largest = 0.0
        # Infinite and NaN values are refused later by the code that reads weights.
        with np.errstate(all="ignore"):
            for begin in range(0, len(blocks), chunk):
                parts, change = self._decode(blocks[begin : begin + chunk])
                if not arrays:
                    arrays = [np.empty((len(blocks), part.shape[1]), part.dtype) for part in parts]
                for array, part in zip(arrays, parts, strict=True):
                    array[begin : begin + chunk] = part
                largest = max(largest, change)
        shaped = (array.reshape(*raw.shape[:-1], -1) for array in arrays)
        return dict(zip(ALL_PARTS, shaped, strict=True)), largest

    def _decode(self, blocks: Array) -> tuple[list[Array], float]:
        """Return the parts of some blocks, each with a row for a block, and the largest change."""
        scale, bias = self._groups(blocks)
        stored = self._common(scale, bias) if self.finer else (scale, bias)
        scales, biases = (array.astype(np.float16).reshape(-1) for array in stored)
        integers, change = _values(self.integers, blocks), 0.0
        if self.finer:
            rounded = (array.astype(np.float32) for array in (scales, biases))
            integers, change = self._finer(integers, scale, bias, *rounded)
        parts = (_packed(integers, self.bits).view(np.uint32), scales, biases)
        return [part.reshape(len(blocks), -1) for part in parts], change

    def _groups(self, blocks: Array) -> tuple[Array, Array]:
        """Return the scales and biases of the groups in the file, float32, shape (blocks,
        groups)."""
        scale = _float16(blocks, self.scale)
        minimum = np.zeros_like(scale) if self.minimum is None else _float16(blocks, self.minimum)
        if self.factors:
            factors = _values(self.factors, blocks).astype(np.float32) - self.factor_zero
            if self.minimum is not None:
                factors, of_minimum = np.split(factors, 2, axis=-1)
                minimum = minimum * -of_minimum
            scale = scale * factors
        return scale, minimum - self.zero * scale

    def _common(self, scale: Array, bias: Array) -> tuple[Array, Array]:
        """Return the scale and the bias of each pair of groups, shape (pairs,). If the range of the
        pair permits, they represent the group with the larger scale exactly."""
        scale, bias = _pairs(scale), _pairs(bias)
        ends = np.stack([bias, bias + self.top * scale])
        low, high = ends.min(axis=(0, 1)), ends.max(axis=(0, 1))
        second = np.abs(scale[1]) > np.abs(scale[0])
        largest, start = (np.where(second, array[1], array[0]) for array in (np.abs(scale), bias))
        # One integer is left free, for a bias below `low`.
        step = np.maximum(largest / self.finer, (high - low) / ((1 << self.bits) - 2))
        return step, start - step * np.ceil((start - low) / np.where(step > 0, step, 1))

    def _finer(
        self, integers: Array, scale: Array, bias: Array, step: Array, lowest: Array
    ) -> tuple[Array, float]:
        """Return the nearest integers of pairs of groups, and the largest change of a weight,
        relative to the larger scale of its pair. step, lowest: The pairs' scales and biases."""
        divisor = np.where(step > 0, step, 1)
        factor, offset = _pairs(scale) / divisor, (_pairs(bias) - lowest) / divisor
        # NumPy is fast if the last axis is long: (weights of a group, 2, pairs).
        exact = np.ascontiguousarray(integers.reshape(step.size, 2, -1).T) * factor
        exact += offset
        nearest = np.rint(exact).clip(0, (1 << self.bits) - 1)
        exact -= nearest
        changes = np.abs(exact, out=exact).max(axis=(0, 1)) / np.abs(factor).max(axis=0)
        largest = float(changes.max(where=changes < np.inf, initial=0))
        return np.ascontiguousarray(nearest.astype(np.uint8).T), largest


def _pairs(groups: Array) -> Array:
    """Return the first and the second group of each pair: (blocks, groups) -> (2, pairs)."""
    return np.ascontiguousarray(groups.reshape(-1, 2).T)


def _float16(blocks: Array, begin: int) -> Array:
    """Return one float16 of each block, as float32, shape (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(np.float32)


def _values(fields: tuple[Field, ...], blocks: Array) -> Array:
    """Return the integers whose bits several fields hold."""
    values, shift = fields[0].read(blocks), fields[0].bits
    for field in fields[1:]:
        values |= field.read(blocks) << np.uint8(shift)
        shift += field.bits
    return values


def _packed(integers: Array, bits: int) -> Array:
    """Pack integers of 8 bits into a little-endian stream of fewer bits, as MLX stores them."""
    lanes = np.ascontiguousarray(integers).reshape(-1).view("<u8")
    for width in (8, 16, 32) if bits < 8 else ():
        lower = np.uint64((2**64 - 1) // (2**width + 1))  # every other lane of `width` bits
        upper = (lanes >> np.uint64(width) & lower) << np.uint64(width * bits // 8)
        lanes = lanes & lower | upper
    return np.ascontiguousarray(lanes.view(np.uint8).reshape(-1, 8)[:, :bits]).reshape(-1)


def _block_type(entry: dict[str, Any]) -> BlockType:
    lists = ("integers", "factors")
    fields = {name: tuple(Field(*field) for field in entry.get(name, ())) for name in lists}
    return BlockType(**{**entry, **fields})


TABLES = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text(encoding="utf-8"))
TYPES: dict[str, BlockType] = {name: _block_type(entry) for name, entry in TABLES["blocks"].items()}
"""Name of a quantized type -> its blocks."""
