"""A written checkpoint against its source: every tensor read back and compared, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import OutputError
from .files import Weights
from .quantization import Quantization
from .tensors import Tensor
from .writer import Change


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences from the source's values, each with the tensor that has it.

    tensors: how many of the source's were compared. plain: over tensors that were not quantized
    here, 0.0 unless their type changed. quantized: over those that were, None where there are none.
    """

    tensors: int
    plain: float
    plain_name: str
    quantized: float | None
    quantized_name: str


def compare(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    change: Callable[[str, Tensor], Change],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Differences:
    """Read back what was written of `tensors` under `change` and hold it to them, in pieces.

    Plain tensors have to be the source's values in their new type, bit for bit; quantized ones may
    differ by their step. Raises OutputError naming the first tensor that does not
    hold; progress is called with the source bytes of each piece done.
    """
    written = Weights(directory)
    largest: dict[bool, tuple[float, str]] = {}
    expected: set[str] = set()
    count = 0
    for name, source in tensors:
        asked = change(name, source)
        names = asked.stored(name, asked.cast(source.outline)).keys()
        if not names <= written.infos.keys():
            raise OutputError(_sentence(name, "is missing"))
        expected |= names
        difference = _difference(written, name, source, asked, progress)
        largest[asked.quantization is not None] = max(
            (difference, name),
            largest.get(asked.quantization is not None, (-1.0, "")),
            key=lambda pair: pair[0],
        )
        count += 1
    if extra := written.infos.keys() - expected:
        raise OutputError(_sentence(min(extra), "should not be there"))
    return Differences(count, *largest.get(False, (0.0, "")), *largest.get(True, (None, "")))


def _difference(
    written: Weights,
    name: str,
    source: Tensor,
    asked: Change,
    progress: Callable[[int], None],
) -> float:
    """The largest of one tensor."""
    result = written.tensor(name)
    if asked.quantization is None:
        if (result.dtype, result.shape) != (asked.dtype or source.dtype, source.shape):
            raise OutputError(_sentence(name, "differs from its source"))
    elif result.shape[:-1] != source.shape[:-1]:
        raise OutputError(_sentence(name, "has another shape than its source"))
    names = asked.stored(name, asked.cast(source.outline)).keys()
    largest = 0.0
    for begin, piece in source.pieces():
        end = begin + (piece.shape[0] if piece.ndim else 1)
        rows = {each: written.rows(each, begin, end) for each in names}
        largest = max(largest, _of_piece(rows, name, piece, asked))
        progress(piece.nbytes)
        del piece, rows
    mx.clear_cache()
    return largest


def _of_piece(rows: Mapping[str, mx.array], name: str, source: mx.array, asked: Change) -> float:
    how, values = asked.quantization, rows[name]
    if how is not None:
        values = _dequantized(rows, name, how)
        if values.shape != source.shape:
            raise OutputError(_sentence(name, "has another shape than its source"))
    if how is None or how.mode != "affine":
        # Also where steps grow with the values: done again, it has to give the same bits.
        again = asked.stored(name, asked.cast(source))
        if not all(mx.array_equal(_bits(rows[each]), _bits(again[each])).item() for each in again):
            raise OutputError(_sentence(name, "differs from its source"))
    if source.size == 0 or (how is None and values.dtype == source.dtype):
        return 0.0
    distance = mx.abs(values.astype(mx.float32) - source.astype(mx.float32))
    if how is not None and how.mode == "affine":
        groups = (*source.shape[:-1], -1, how.group_size)
        reach = mx.max(mx.abs(source.astype(mx.float32)).reshape(groups), axis=-1)
        scales = rows[f"{name.removesuffix('.weight')}.scales"]
        allowed = _allowed(scales, reach, asked.dtype or source.dtype, how)
        if not mx.all(mx.max(distance.reshape(groups), axis=-1) <= allowed).item():
            raise OutputError(
                _sentence(name, "differs from its source by more than quantization explains")
            )
    return mx.max(distance).item()  # type: ignore[return-value]


def _dequantized(rows: Mapping[str, mx.array], name: str, how: Quantization) -> mx.array:
    path = name.removesuffix(".weight")
    try:
        return how.dequantize(rows[name], rows[f"{path}.scales"], rows.get(f"{path}.biases"))
    except ValueError as problem:
        raise OutputError(_sentence(name, "is not quantized as asked")) from problem


def _allowed(scales: mx.array, reach: mx.array, dtype: mx.Dtype, how: Quantization) -> mx.array:
    """The largest error per group that quantization explains.

    MLX moves the step so that the group's largest magnitude is met exactly, which costs the other
    end up to one step where rounding alone would cost half of one; then the type of scales and
    biases rounds `reach` itself, twice over the whole range.
    """
    rounding = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}.get(dtype, 2.0**-20)
    step = mx.abs(scales.astype(mx.float32))
    return step * 1.01 + 4 * rounding * reach + rounding * step * 2**how.bits


def _bits(array: mx.array) -> mx.array:
    """As unsigned integers, where equal means the same bits."""
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return array if array.dtype == mx.bool_ else array.view(kinds[array.dtype.size])


def _sentence(name: str, problem: str) -> str:
    return f"read back, the tensor {name} {problem}: the disk may be failing, convert again"
