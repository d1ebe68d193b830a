"""Writes safetensors shards, their index and config.json in mlx-lm's layout, and checks the files.
The header of a shard is computed from lazy arrays. Then tensors are read one by one, changed and
written in pieces."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, OutputError
from .disk import blocks
from .formats.safetensors import header_of, read_header
from .quantization import Quantization
from .shards import INDEX
from .tensors import NAMES, Tensor, dtype_name

PIECE_BYTES = 1 << 22
"""Bytes of a piece. Memory holds the copies of a piece and of no more than that."""
Report = Callable[[int], None]
"""A function that is called with the bytes of each piece."""


@dataclass(frozen=True)
class ResultTensor:
    """A tensor of the source and what becomes of it: a cast, then the quantization of a matrix.
    None means no change.

    Attributes:
        name: The final name.
        parameters: The number of weights. Scales are none, and packed weights count singly.
    """

    name: str
    source: Tensor
    parameters: int
    dtype: mx.Dtype | None = None
    quantization: Quantization | None = None

    def cast(self, rows: mx.array) -> mx.array:
        return rows if self.dtype is None else rows.astype(self.dtype)

    def stored(self, cast: mx.array) -> dict[str, mx.array]:
        """Return the arrays to store for some rows, by name."""
        if self.quantization is None:
            return {self.name: cast}
        path, parts = self.name.removesuffix(".weight"), self.quantization.quantize(cast)
        return {f"{path}.{part}": rows for part, rows in parts.items()}

    @property
    def outlines(self) -> dict[str, mx.array]:
        """Lazy arrays of the final dtypes and shapes, by name."""
        return self.stored(self.cast(self.source.outline))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.outlines.values())

    def distance(self, rows: mx.array, stored: Mapping[str, mx.array]) -> float:
        """Return the largest absolute difference between rows and what is stored for them."""
        values, how = [*stored.values()], self.quantization
        if rows.size == 0 or (how is None and values[0].dtype == rows.dtype):
            return 0.0
        held = values[0] if how is None else how.dequantize(*values)
        difference = mx.abs(held.astype(mx.float32) - rows.astype(mx.float32))
        return mx.max(difference).item()  # type: ignore[return-value]


@dataclass
class Written:
    """What was written.

    Attributes:
        tensors, parameters, nbytes: The totals of the model.
        files: The CRC-32 of each tensor, by the path of its file and by its name.
        largest: The largest absolute difference from the source's values, with the name of its
            tensor. There is one entry for quantized tensors (True), and one for the others.
    """

    tensors: int
    parameters: int
    nbytes: int
    files: dict[Path, dict[str, int]]
    largest: dict[bool, tuple[float, str]]


def write_weights(
    directory: Path,
    outputs: list[ResultTensor],
    *,
    shard_bytes: int,
    progress: Report = lambda nbytes: None,
) -> Written:
    """Write model.safetensors, or model-0000i-of-0000n.safetensors, and the index. `outputs` are
    removed from their list as they are written, to free memory. Raises OSError, and CheckpointError
    if values are not finite.

    Args:
        shard_bytes: The most bytes in one file, unless a single tensor has more.
        progress: Is called with the source bytes of each piece.
    """
    shards: list[list[ResultTensor]] = [[]]
    size = total = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size, total = size + output.nbytes, total + output.nbytes
    parameters = sum(output.parameters for output in outputs)
    outputs.clear()
    written = Written(0, parameters, total, {}, {})
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = directory / (several if len(shards) > 1 else "model.safetensors")
        write_file(file, shard, written, progress)
        places.update(dict.fromkeys(written.files[file], file.name))
    written.tensors = len(places)
    metadata = {"total_size": total, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    return written


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.json as mlx-lm does: sorted, with the quantization under both common names."""
    entries = {key: value for key, value in config.items() if key != "_name_or_path"}
    if "quantization" in entries:
        entries["quantization_config"] = entries["quantization"]
    text = json.dumps(dict(sorted(entries.items())), indent=4)
    (directory / "config.json").write_text(text, encoding="utf-8")


def write_file(
    file: Path,
    outputs: list[ResultTensor],
    written: Written,
    progress: Report = lambda nbytes: None,
    layout: str = "mlx",
) -> None:
    """Write one file, and add it to `written`; see `write_weights`. layout: The value of "format"
    in the file's metadata."""
    offsets, header = _header(outputs, layout)
    sums = written.files[file] = dict.fromkeys(offsets, 0)
    with file.open("xb") as stream:
        stream.write(header)
        outputs.reverse()
        while outputs:
            output = outputs.pop()
            quantized = output.quantization is not None
            mx.eval(tensor := output.source.read())
            for begin, piece in _pieces(tensor):
                cast = output.cast(piece)
                _check_values(output.name, piece, cast)
                stored = output.stored(cast)
                for part, array in stored.items():
                    row = array.nbytes // max(1, array.shape[0] if array.ndim else 1)
                    stream.seek(len(header) + offsets[part] + begin * row)
                    flat: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
                    stream.write(memoryview(flat))
                    sums[part] = crc32(memoryview(flat), sums[part])
                    del array, flat
                here = output.distance(piece, stored), output.name
                written.largest[quantized] = max(written.largest.get(quantized, here), here)
                progress(piece.nbytes)
                del piece, cast, stored
            del output, tensor
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())


def read_back(
    file: Path, sums: Mapping[str, int], progress: Report = lambda nbytes: None
) -> dict[str, Any]:
    """Read a written file once more and return its "bytes" and "sha256". Raises OutputError if a
    tensor has another checksum than in `sums`."""
    infos, digest = read_header(file), hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as stream:
        digest.update(stream.read(size - sum(info.nbytes for info in infos.values())))
        for name, info in infos.items():
            found = 0
            for block in blocks(stream, info.nbytes):
                digest.update(block)
                found = crc32(block, found)
                progress(len(block))
            if found != sums[name]:
                problem = "differs from what was written: the disk may be failing, convert again"
                raise OutputError(f"read back, {name} {problem}")
    return {"bytes": size, "sha256": digest.hexdigest()}


def _header(outputs: Iterable[ResultTensor], layout: str) -> tuple[dict[str, int], bytes]:
    """Return each array's offset, and the header. The widest types come first, for alignment."""
    arrays = [pair for output in outputs for pair in output.outlines.items()]
    arrays.sort(key=lambda pair: -pair[1].dtype.size)
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": layout}}
    position = 0
    for name, array in arrays:
        offsets[name] = position
        entries[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    return offsets, header_of(entries)


def _pieces(array: mx.array) -> Iterator[tuple[int, mx.array]]:
    """Yield the rows in pieces of about PIECE_BYTES, as pairs (number of the first row, rows)."""
    extent = array.shape[0] if array.ndim else 1
    step = max(1, PIECE_BYTES * extent // max(1, array.nbytes))
    for begin in range(0, extent, step):
        yield begin, array[begin : begin + step] if array.ndim else array


def _check_values(name: str, piece: mx.array, cast: mx.array) -> None:
    def finite(array: mx.array) -> bool:
        # numpy is many times faster here than mx.isfinite on a CPU.
        return bool(np.isfinite(np.array(array.astype(mx.float32), copy=False)).all())

    if not mx.issubdtype(piece.dtype, mx.floating):
        return
    if not finite(piece):
        raise CheckpointError(f"{name} is damaged: some of its values are not finite")
    if cast is not piece and not finite(cast):
        raise CheckpointError(f"{name} is too large for {dtype_name(cast.dtype)}: use bfloat16")
