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
    largest: dict[bool, tuple[float, str]] = {False: (0.0, ""), True: (-1.0, "")}
    expected: set[str] = set()
    count = 0
    for name, source in tensors:
        asked = change(name, source)
        quantized = asked.quantization is not None
        path = name.removesuffix(".weight")
        parts = asked.quantization.parts if asked.quantization is not None else ()
        expected |= {name, *(f"{path}.{part}" for part in parts)}
        if not expected <= written.infos.keys():
            raise OutputError(_sentence(name, "is missing"))
        difference = _difference(written, name, source, asked, progress)
        if difference > largest[quantized][0] or not largest[quantized][1]:
            largest[quantized] = (difference, name)
        count += 1
    if extra := written.infos.keys() - expected:
        raise OutputError(_sentence(min(extra), "should not be there"))
    value, value_name = largest[True]
    return Differences(
        tensors=count,
        plain=largest[False][0],
        plain_name=largest[False][1],
        quantized=value if value_name else None,
        quantized_name=value_name,
    )


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
    largest = 0.0
    for begin, piece in source.pieces():
        end = begin + (piece.shape[0] if piece.ndim else 1)
        if asked.quantization is None:
            difference = _plain(result.rows(begin, end), name, piece, asked)
        else:
            path = name.removesuffix(".weight")
            names = ("weight", *asked.quantization.parts)
            parts = {part: written.rows(f"{path}.{part}", begin, end) for part in names}
            difference = _quantized(parts, name, piece, asked, asked.quantization)
            del parts
        largest = max(largest, difference)
        progress(piece.nbytes)
        del piece
    mx.clear_cache()
    return largest


def _plain(result: mx.array, name: str, source: mx.array, asked: Change) -> float:
    wanted = source if asked.dtype is None else source.astype(asked.dtype)
    if not mx.array_equal(_bits(result), _bits(wanted)).item():
        raise OutputError(_sentence(name, "differs from its source"))
    if source.size == 0 or asked.dtype is None or asked.dtype == source.dtype:
        return 0.0
    return _largest(_distance(result, source))


def _quantized(
    parts: Mapping[str, mx.array],
    name: str,
    source: mx.array,
    asked: Change,
    how: Quantization,
) -> float:
    scales = parts["scales"]
    try:
        values = how.dequantize(parts["weight"], scales, parts.get("biases"))
    except ValueError as problem:
        raise OutputError(_sentence(name, "is not quantized as asked")) from problem
    if values.shape != source.shape:
        raise OutputError(_sentence(name, "has another shape than its source"))
    if how.mode != "affine":
        return _same_quantized(parts, name, values, source, asked, how)
    groups = (*source.shape[:-1], -1, how.group_size)
    distance = mx.max(_distance(values, source).reshape(groups), axis=-1)
    reach = mx.max(mx.abs(source.astype(mx.float32)).reshape(groups), axis=-1)
    if not mx.all(distance <= _allowed(scales, reach, asked.dtype or source.dtype, how)).item():
        raise OutputError(
            _sentence(name, "differs from its source by more than quantization explains")
        )
    return _largest(distance)


def _same_quantized(
    parts: Mapping[str, mx.array],
    name: str,
    values: mx.array,
    source: mx.array,
    asked: Change,
    how: Quantization,
) -> float:
    """As `_quantized`, of formats whose steps grow with the values: quantized again, the source has
    to give the same bits."""
    again = how.quantize(source if asked.dtype is None else source.astype(asked.dtype))
    if not all(mx.array_equal(parts[part], again[part]).item() for part in again):
        raise OutputError(_sentence(name, "differs from its source"))
    return _largest(_distance(values, source))


def _allowed(scales: mx.array, reach: mx.array, dtype: mx.Dtype, how: Quantization) -> mx.array:
    """The largest error per group that quantization explains.

    MLX moves the step so that the group's largest magnitude is met exactly, which costs the other
    end up to one step where rounding alone would cost half of one; then the type of scales and
    biases rounds `reach` itself, twice over the whole range.
    """
    rounding = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}.get(dtype, 2.0**-20)
    step = mx.abs(scales.astype(mx.float32))
    return step * 1.01 + 4 * rounding * reach + rounding * step * 2**how.bits


def _largest(array: mx.array) -> float:
    return mx.max(array).item()  # type: ignore[return-value]


def _bits(array: mx.array) -> mx.array:
    """As unsigned integers, where equal means the same bits."""
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return array if array.dtype == mx.bool_ else array.view(kinds[array.dtype.size])


def _distance(result: mx.array, source: mx.array) -> mx.array:
    return mx.abs(result.astype(mx.float32) - source.astype(mx.float32))


def _sentence(name: str, problem: str) -> str:
    return f"read back, the tensor {name} {problem}: the disk may be failing, convert again"
