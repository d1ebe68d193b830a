"""What a conversion is asked to do to the numbers: type, packing or unpacking. Checks, and no more.

Knows mlx-lm's names and defaults. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OptionError
from .keys import MIXED, MODES, Q_BITS, Q_GROUP_SIZES, Quantisation

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Wanted:
    """dtype: None for as stored. quantisation: of what may be packed, None to pack nothing. mixed:
    a key of `keys.MIXED`, or "". dequantize: unpack what the source has packed."""

    dtype: str | None = None
    quantisation: Quantisation | None = None
    mixed: str = ""
    dequantize: bool = False

    @classmethod
    def checked(
        cls,
        *,
        dtype: str | None,
        quantize: bool,
        bits: int | None,
        group_size: int | None,
        mode: str,
        mixed: str | None,
        dequantize: bool,
    ) -> Wanted:
        """From what a user gives; None is the mode's default. Raises OptionError."""
        if dtype is not None and dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if quantize and dequantize:
            raise OptionError("choose either --quantize or --dequantize, not both")
        packing = {
            "--q-bits": bits is not None,
            "--q-group-size": group_size is not None,
            "--q-mode": mode != "affine",
            "--quant-predicate": bool(mixed),
        }
        given = [flag for flag, is_given in packing.items() if is_given]
        if given and not quantize:
            raise OptionError(f"{given[0]} says how to pack: add --quantize")
        how = _quantisation(bits, group_size, mode, mixed) if quantize else None
        return cls(dtype, how, mixed or "", dequantize)


def _quantisation(
    bits: int | None, group_size: int | None, mode: str, mixed: str | None
) -> Quantisation:
    if mode not in MODES:
        raise OptionError(f"q-mode must be one of {', '.join(MODES)}, not {mode!r}")
    if mixed and mixed not in MIXED:
        raise OptionError(f"quant-predicate must be one of {', '.join(MIXED)}, not {mixed!r}")
    if mixed and mode != "affine":
        raise OptionError(f"{mixed} mixes affine packings: leave --q-mode out")
    if mixed and bits is not None:
        raise OptionError(f"{mixed} says the bits itself: leave --q-bits out")
    how = MODES[mode]
    how = Quantisation(
        MIXED[mixed][0] if mixed else how.bits if bits is None else bits,
        how.group_size if group_size is None else group_size,
        mode,
    )
    if mode != "affine":
        if how != MODES[mode]:
            only = MODES[mode]
            raise OptionError(
                f"{mode} has {only.bits} bits in groups of {only.group_size}: leave --q-bits and "
                "--q-group-size out"
            )
        return how
    if how.bits not in Q_BITS:
        raise OptionError(f"q-bits must be one of {_list(Q_BITS)}, not {how.bits}")
    if how.group_size not in Q_GROUP_SIZES:
        raise OptionError(
            f"q-group-size must be one of {_list(Q_GROUP_SIZES)}, not {how.group_size}"
        )
    return how


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
