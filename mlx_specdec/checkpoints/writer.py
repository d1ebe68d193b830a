"""Writing of safetensors shards, their index and config.json in mlx-lm's layout. The header of a
shard is computed from lazy arrays. Then pieces are read, changed and written one by one."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, first_line
from .quantization import Quantization
from .shards import INDEX
from .tensors import NAMES, Tensor, dtype_name

_PART_NAME = "part-{}.safetensors"


@dataclass(frozen=True)
class TensorChange:
    """The change of a tensor: a cast, then the quantization of a matrix. None means no change."""

    dtype: mx.Dtype | None = None
    quantization: Quantization | None = None

    def cast(self, rows: mx.array) -> mx.array:
        return rows if self.dtype is None else rows.astype(self.dtype)

    def outlines(self, name: str, source: Tensor) -> dict[str, mx.array]:
        return self.stored(name, self.cast(source.outline))

    def nbytes(self, name: str, source: Tensor) -> int:
        return sum(array.nbytes for array in self.outlines(name, source).values())

    def stored(self, name: str, cast: mx.array) -> dict[str, mx.array]:
        if self.quantization is None:
            return {name: cast}
        path = name.removesuffix(".weight")
        return {f"{path}.{part}": rows for part, rows in self.quantization.quantize(cast).items()}


@dataclass(frozen=True)
class Written:
    """The totals of a written model. parameters: The number of weights; scales do not count."""

    tensors: int
    parameters: int
    nbytes: int


_Item = tuple[str, Tensor, TensorChange]


def write_weights(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    change: Callable[[str, Tensor], TensorChange],
    *,
    shard_bytes: int,
    count: Callable[[str, Tensor], int] = lambda name, tensor: tensor.size,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Written:
    """Write model.safetensors, or model-0000i-of-0000n.safetensors, and the index. Raises OSError,
    and CheckpointError if values are not finite.

    Args:
        tensors: Final name and tensor of the source.
        change: Returns the change of a tensor.
        shard_bytes: The most bytes in one file, unless a single tensor has more.
        count: Returns the number of weights in a tensor.
        progress: Called with the source bytes of each piece.
    """
    shards: list[list[str]] = []
    waiting: list[_Item] = []
    size = total = parameters = 0

    def write() -> None:
        shards.append(_write_shard(directory / _PART_NAME.format(len(shards)), waiting, progress))

    for name, tensor in tensors:
        item = (name, tensor, change(name, tensor))
        nbytes = item[2].nbytes(name, tensor)
        if waiting and size + nbytes > shard_bytes:
            write()
            size = 0
        waiting.append(item)
        size, total = size + nbytes, total + nbytes
        parameters += count(name, tensor)
        del item, tensor
    if waiting:
        write()
    _name_shards(directory, shards, total, parameters)
    return Written(sum(map(len, shards)), parameters, total)


def write_unchanged(
    file: Path, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write a single file of tensors without a change; see `write_weights`."""
    items = [(name, tensor, TensorChange()) for name, tensor in tensors.items()]
    _write_shard(file, items, progress, layout="pt")


def write_config(
    directory: Path, config: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> None:
    """Write config.json as mlx-lm does: sorted, with the quantization under both common names."""
    entries = {key: value for key, value in config.items() if key != "_name_or_path"}
    if quantization is not None:
        entries["quantization"] = dict(quantization)
    if "quantization" in entries:
        entries["quantization_config"] = entries["quantization"]
    text = json.dumps(dict(sorted(entries.items())), indent=4)
    (directory / "config.json").write_text(text, encoding="utf-8")


def stored_nbytes(
    outlines: Mapping[str, mx.array], change: Callable[[str, Tensor], TensorChange]
) -> int:
    """Return the bytes of the tensors that `write_weights` would write. outlines: Lazy arrays."""
    tensors = ((name, Tensor.of(outline)) for name, outline in outlines.items())
    return sum(change(name, tensor).nbytes(name, tensor) for name, tensor in tensors)


def _write_shard(
    file: Path, items: list[_Item], progress: Callable[[int], None], layout: str = "mlx"
) -> list[str]:
    """Write one file, remove its tensors from `items` to free memory, and return their names.
    layout: The value of "format" in the file's metadata."""
    offsets, header = _header(items, layout)
    with file.open("xb") as stream:
        stream.write(header)
        items.reverse()
        while items:
            name, source, change = items.pop()
            for begin, piece in source.pieces():
                cast = change.cast(piece)
                _check_values(name, piece, cast)
                for part, array in change.stored(name, cast).items():
                    row = array.nbytes // max(1, array.shape[0] if array.ndim else 1)
                    stream.seek(len(header) + offsets[part] + begin * row)
                    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
                    stream.write(memoryview(flat))  # type: ignore[arg-type]
                    del array, flat
                progress(piece.nbytes)
                del piece, cast
            del source
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())
    return list(offsets)


def _header(items: list[_Item], layout: str) -> tuple[dict[str, int], bytes]:
    """Return each array's offset, and the header. The widest types come first, for alignment."""
    arrays = [pair for name, source, how in items for pair in how.outlines(name, source).items()]
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
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return offsets, len(text).to_bytes(8, "little") + text


def _check_values(name: str, piece: mx.array, cast: mx.array) -> None:
    def finite(array: mx.array) -> bool:
        # numpy is many times faster here than mx.isfinite on a CPU.
        return bool(np.isfinite(np.array(array.astype(mx.float32), copy=False)).all())

    if not mx.issubdtype(piece.dtype, mx.floating):
        return
    try:
        if not finite(piece):
            raise CheckpointError(f"{name} is damaged: some of its values are not finite")
        if cast is not piece and not finite(cast):
            raise CheckpointError(f"{name} is too large for {dtype_name(cast.dtype)}: use bfloat16")
    except RuntimeError as problem:
        raise CheckpointError(f"{name} cannot be read: {first_line(problem)}") from problem


def _name_shards(directory: Path, shards: list[list[str]], total: int, parameters: int) -> None:
    """Rename the shards to names with their final number, and write the index."""
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        numbered = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = numbered if len(shards) > 1 else "model.safetensors"
        (directory / _PART_NAME.format(number)).rename(directory / file)
        places.update(dict.fromkeys(names, file))
    metadata = {"total_size": total, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
