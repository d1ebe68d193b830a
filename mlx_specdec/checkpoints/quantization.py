"""Quantization of matrices: MLX's formats, entries of config.json, and the user's request."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from ..errors import CheckpointError, OptionError, check_one_of

Q_BITS = (2, 3, 4, 5, 6, 8)
Q_GROUP_SIZES = (32, 64, 128)
PARTS = ("scales", "biases")
"""The parts of a quantized matrix besides its weight. Only the affine format has biases."""
ALL_PARTS = ("weight", *PARTS)
FLOAT_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Quantization:
    """The quantization of a matrix. bits: Bits per weight. group_size: The number of weights that
    share a scale. mode: MLX's name of the format."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def of(cls, entry: Mapping[str, Any], path: str) -> Self:
        """Return the quantization of the matrix at `path`. entry: See `stored_quantization`."""
        exception = entry.get(path)
        how = exception if isinstance(exception, Mapping) else entry
        return cls(how["bits"], how["group_size"], how.get("mode") or "affine")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that a matrix has besides its weight."""
        return PARTS if self.mode == "affine" else PARTS[:1]

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of config.json, whose keys are arguments of nn.quantize too."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def quantize(self, rows: mx.array) -> dict[str, mx.array]:
        """Quantize rows of a matrix to "weight" and `parts`. Every row is quantized on its own."""
        arrays = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.mode)
        return dict(zip(("weight", *self.parts), arrays, strict=True))

    def dequantize(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None = None
    ) -> mx.array:
        """Return the float32 values. Raises ValueError if the parts do not fit together."""
        if self.mode == "affine" and biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        values = mx.dequantize(
            weight, scales, biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        return values.astype(mx.float32)


MODES = {
    "affine": Quantization(4, 64),
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "nvfp4": Quantization(4, 16, "nvfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
}
"""MLX's formats with mlx-lm's default sizes. Only the affine format has other sizes."""
MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
"""mlx-lm's mixed predicates -> the bits of most matrices, and of the most sensitive ones."""

NO_BITS = "none"
"""The value of `convert(quantize=...)` that dequantizes a quantized source."""


def is_known(how: Quantization) -> bool:
    """Return whether MLX supports a quantization."""
    if type(how.bits) is not int or type(how.group_size) is not int:
        return False
    if how.mode == "affine":
        return how.bits in Q_BITS and how.group_size in Q_GROUP_SIZES
    return how in MODES.values()


def quantization_entry(
    matrices: Mapping[str, Quantization], default: Quantization | None = None
) -> dict[str, Any]:
    """Return the "quantization" entry of config.json as mlx-lm writes it, with the matrices that
    differ from the default. matrices: Path -> quantization. default: None means the most common
    one."""
    default = default or Counter(matrices.values()).most_common(1)[0][0]
    entry = default.as_dict()
    for path, how in matrices.items():
        if how != default:
            exception = how.as_dict()
            if how.mode == "affine":
                del exception["mode"]
            entry[path] = exception
    return entry


def stored_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the checked "quantization" entry of config.json, or None. Raises CheckpointError."""
    entry = config.get("quantization")
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError("config.json has a quantization entry that is no object")
    for part in (entry, *(value for value in entry.values() if isinstance(value, Mapping))):
        bits, group_size = part.get("bits"), part.get("group_size")
        how = Quantization(bits, group_size, part.get("mode") or "affine")  # type: ignore[arg-type]
        if not is_known(how):
            raise CheckpointError(f"config.json has a quantization that MLX lacks: {part!a:.80}")
    return entry


@dataclass(frozen=True)
class WeightFormat:
    """The dtype and quantization that a conversion produces.

    Attributes:
        dtype: The dtype of weights that are not quantized; None keeps the stored one.
        quantization: The quantization of matrices; None if the conversion does not quantize.
        mixed: A key of MIXED, or "".
        dequantize: Whether quantized matrices of the source are dequantized.
    """

    dtype: str | None = None
    quantization: Quantization | None = None
    mixed: str = ""
    dequantize: bool = False

    @classmethod
    def checked(cls, dtype: str | None, quantize: int | str | None, group_size: int | None) -> Self:
        """Check the user's options, which `conversion.convert` explains. Raises OptionError."""
        if dtype is not None:
            check_one_of("dtype", dtype, FLOAT_DTYPES)
        if quantize in (None, NO_BITS):
            if group_size is not None:
                raise OptionError("--q-group-size says how to quantize: add --quantize")
            return cls(dtype, dequantize=quantize is not None)
        if type(quantize) is not int:
            check_one_of("quantize", quantize, (*MODES, *MIXED, NO_BITS))
        mixed = quantize if isinstance(quantize, str) and quantize in MIXED else ""
        usual = MODES[quantize if isinstance(quantize, str) and not mixed else "affine"]
        if usual.mode != "affine" and group_size not in (None, usual.group_size):
            raise OptionError(f"{usual.mode} has one size: leave --q-group-size out")
        size = usual.group_size if group_size is None else group_size
        bits = MIXED[mixed][0] if mixed else usual.bits if isinstance(quantize, str) else quantize
        how = Quantization(bits, size, usual.mode)
        if how.mode == "affine":
            check_affine(how.bits, how.group_size)
        return cls(dtype, how, mixed)

    def describe(self) -> str:
        """Return a description such as "4-bit, types as stored"."""
        words, how = self.dtype or "types as stored", self.quantization
        if how is None:
            return f"dequantized, {words}" if self.dequantize else words
        mode = "" if how.mode == "affine" else f" {how.mode}"
        return f"{self.mixed or f'{how.bits}-bit'}{mode}, {words}"


def check_affine(bits: int, group_size: int) -> None:
    """Raise OptionError for bits or a group size that MLX does not support."""
    check_one_of("q-bits", bits, Q_BITS)
    check_one_of("q-group-size", group_size, Q_GROUP_SIZES)
