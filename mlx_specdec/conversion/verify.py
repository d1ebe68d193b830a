"""A written checkpoint against its source: every tensor read back, and what both models compute,
which functions that the caller hands in find out (`compare_models`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..checkpoints import disk as sizes
from ..checkpoints.tensors import Reader, Tensor
from ..checkpoints.writer import Change
from ..errors import CheckpointError, OptionError, OutputError, SpecdecError

SHARE_OF_MEMORY = 0.5
"""A model may take this much of the machine's memory when its logits are computed."""
SHARE_OF_SHARD = 1.2
"""And this much of a shard, unless the comparison was asked for."""
QUICK_BYTES = 600_000_000
"""Nor more than this, unless it was asked for or weights were quantized: to run both models takes
longer than to convert, above some 100 million weights by several times."""
LOADED_BYTES = 6
"""Of one weight while its model is loaded in float32: the result and what it was read as."""
SAME_LOGITS = 1e-3
"""How far log-probabilities may lie apart where not one weight changed its value."""


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
    written: Reader,
    tensors: Iterable[tuple[str, Tensor]],
    change: Callable[[str, Tensor], Change],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Differences:
    """Read back what was `written` of `tensors` under `change`, and hold it bit for bit to the same
    change made anew. Raises OutputError naming the first tensor that does not hold."""
    largest: dict[bool, tuple[float, str]] = {}
    expected: set[str] = set()
    count = 0
    for name, source in tensors:
        asked = change(name, source)
        outlines = asked.outlines(name, source)
        expected |= outlines.keys()
        for each, outline in outlines.items():
            if each not in written.infos:
                raise _wrong(name, "is missing")
            result = written.tensor(each)
            if (result.dtype, result.shape) != (outline.dtype, outline.shape):
                raise _wrong(name, "is of another type or shape than was asked for")
        quantized = asked.quantization is not None
        difference = _difference(written, name, source, asked, progress)
        if difference > largest.get(quantized, (-1.0, ""))[0]:
            largest[quantized] = difference, name
        count += 1
    if extra := written.infos.keys() - expected:
        raise _wrong(min(extra), "should not be there")
    return Differences(count, *largest.get(False, (0.0, "")), *largest.get(True, (None, "")))


def _difference(
    written: Reader, name: str, source: Tensor, asked: Change, progress: Callable[[int], None]
) -> float:
    largest = 0.0
    for begin, piece in source.pieces():
        end = begin + (piece.shape[0] if piece.ndim else 1)
        again = asked.stored(name, asked.cast(piece))
        rows = {each: written.rows(each, begin, end) for each in again}
        if not all(mx.array_equal(_bits(rows[each]), _bits(again[each])).item() for each in again):
            raise _wrong(name, "differs from its source")
        largest = max(largest, _distance(rows, name, piece, asked))
        progress(piece.nbytes)
        del piece, again, rows
    mx.clear_cache()
    return largest


def _distance(rows: Mapping[str, mx.array], name: str, source: mx.array, asked: Change) -> float:
    values = rows[name]
    if source.size == 0 or (asked.quantization is None and values.dtype == source.dtype):
        return 0.0
    if asked.quantization is not None:
        path = name.removesuffix(".weight")
        values = asked.quantization.dequantize(
            values, rows[f"{path}.scales"], rows.get(f"{path}.biases")
        )
    distance = mx.abs(values.astype(mx.float32) - source.astype(mx.float32))
    return mx.max(distance).item()  # type: ignore[return-value]


def _bits(array: mx.array) -> mx.array:
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return array if array.dtype == mx.bool_ else array.view(kinds[array.dtype.size])


def _wrong(name: str, problem: str) -> OutputError:
    return OutputError(
        f"read back, the tensor {name} {problem}: the disk may be failing, convert again"
    )


@dataclass(frozen=True)
class TextChange:
    """How a fixed text fares with source and result, teacher-forced, token by token.

    tokens: how many were scored. Perplexities are exp(-mean log p). mean and largest: of the
    absolute change of log p of the text's own tokens, in nats. same_first: share of positions where
    both models hold the same token for the likeliest.
    """

    tokens: int
    source_perplexity: float
    result_perplexity: float
    mean: float
    largest: float
    same_first: float

    def describe(self) -> str:
        """In one line."""
        return (
            f"fixed text of {self.tokens} tokens: perplexity {self.source_perplexity:.4g} -> "
            f"{self.result_perplexity:.4g}, log-probability changes by {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most; same first choice at {self.same_first:.1%}"
        )


@dataclass(frozen=True)
class Verified:
    """What comparing showed. logits None: not compared, and `note` says why; text likewise, None as
    well where nobody asked for it."""

    logits: float | None
    text: TextChange | None
    note: str

    def describe(self) -> list[str]:
        """In lines."""
        if self.logits is None:
            return [f"logits not compared: {self.note}"]
        lines = [f"log-probabilities on a fixed input: largest difference {self.logits:.3g}"]
        if self.note:
            lines.append(f"fixed text not scored: {self.note}")
        return lines if self.text is None else [*lines, self.text.describe()]


def check_fits(parameters: int) -> None:
    """Raises OptionError where models of so many weights cannot be loaded to be compared."""
    needed, room = parameters * LOADED_BYTES, SHARE_OF_MEMORY * sizes.memory()
    if needed > room:
        raise OptionError(
            f"to verify takes {sizes.show(needed)} of memory, and {sizes.show(int(room))} may be "
            "used here: leave --verify out, every tensor is compared all the same"
        )


def verify(
    source: Path,
    result: Path,
    parameters: int,
    differences: Differences,
    *,
    compare_logits: Callable[[Path, Path], float] | None,
    compare_text: Callable[[Path, Path], TextChange] | None,
    asked: bool,
    shard_bytes: int,
) -> Verified:
    """Compare where it is possible, and where it costs little or weights were quantized or it was
    `asked` for; in the last two cases a fixed text too. Raises CheckpointError."""
    quantized = differences.quantized is not None
    reason = _reason_not_to(parameters, quantized, asked=asked, shard_bytes=shard_bytes)
    if compare_logits is None or reason:
        return Verified(None, None, reason or "no comparison was asked for")
    difference = compare_logits(source, result)
    unchanged = differences.plain == 0 and not quantized
    if math.isnan(difference) or (unchanged and difference > SAME_LOGITS):
        raise CheckpointError(
            f"the converted model does not compute what its source does (log-probabilities differ "
            f"by {difference:.3g}): please report this checkpoint"
        )
    if compare_text is None or not (asked or quantized):
        return Verified(difference, None, "")
    try:
        return Verified(difference, compare_text(source, result), "")
    except SpecdecError as problem:  # both models were loaded: it is the text that cannot be read
        return Verified(difference, None, str(problem))


def _reason_not_to(parameters: int, quantized: bool, *, asked: bool, shard_bytes: int) -> str:
    """Why two models of so many weights are not compared; "" where they are."""
    needed = parameters * LOADED_BYTES
    if needed > SHARE_OF_MEMORY * sizes.memory():
        return "a whole model does not fit in memory"
    if not asked and needed > SHARE_OF_SHARD * shard_bytes:
        return "a whole model takes more memory than --max-shard-size allows; see --verify"
    if not asked and not quantized and needed > QUICK_BYTES:
        return "it would take longer than the conversion; see --verify"
    return ""
