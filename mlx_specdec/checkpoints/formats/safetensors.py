"""Reader of a safetensors file (https://huggingface.co/docs/safetensors). The library safetensors
validates the header. Tensors are read in pieces."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError, first_line
from .. import tensors
from ..disk import open_map, reading
from ..tensors import Malformed, TensorInfo, TensorReader


class SafetensorsFile(TensorReader):
    """The tensors of a file, which are read in pieces through a memory map."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.paths = (file,)
        self.infos, self._map = read_header(file), open_map(file)
        self.stored, self.origins = self.infos, {name: name for name in self.infos}
        position = file.stat().st_size - sum(info.nbytes for info in self.infos.values())
        self._places: dict[str, int] = {}
        for name, info in self.infos.items():
            self._places[name] = position
            position += info.nbytes

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        info = self.infos[name]
        shape = (end - begin, *info.shape[1:]) if info.shape else ()
        place = self._places[name] + begin * (info.nbytes // max(1, info.extent))
        values = np.ndarray(shape, f"<{tensors.ELEMENTS[info.dtype][1]}", self._map, place)
        return tensors.to_mlx(values, info.dtype)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file with the library, which validates the header. Raises CheckpointError."""
    with tensors.naming(file), reading(file):
        try:
            with safe_open(file, framework="numpy") as opened:
                yield opened
        except SafetensorError as problem:
            raise Malformed(f"is truncated or damaged: {first_line(problem):.200}") from None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name, in the order of their bytes. Raises CheckpointError."""
    infos = {}
    with _opened(file) as opened:
        for name in opened.offset_keys():
            tensors.check_name(name)
            tensor = opened.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype not in tensors.DTYPES:
                raise Malformed(f"stores {name} as {dtype}, which MLX does not read")
            infos[name] = TensorInfo.of(dtype, shape)
    return infos


def header_of(entries: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file with these entries, up to its tensors."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def metadata(file: Path) -> dict[str, str]:
    """Return the entries of a file's header about the file. Raises CheckpointError."""
    with _opened(file) as opened:
        return dict(opened.metadata() or {})


def load(file: Path) -> dict[str, mx.array]:
    """Return a file's tensors as lazy arrays. Raises CheckpointError."""
    try:
        return dict(mx.load(str(file)))  # type: ignore[arg-type]
    except (RuntimeError, UnicodeEncodeError) as problem:
        raise CheckpointError(f"{file} cannot be read: {first_line(problem)}") from problem
