"""Reader of a safetensors file (https://huggingface.co/docs/safetensors). The library safetensors
validates the header."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError, first_line
from .. import tensors
from ..disk import reading
from ..tensors import Malformed, TensorInfo, TensorReader


class SafetensorsFile(TensorReader):
    """The tensors of a file, which are returned as lazy arrays."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.paths = (file,)
        self.infos = read_header(file)
        self.stored, self.origins = self.infos, {name: name for name in self.infos}
        self._arrays: dict[str, mx.array] = {}

    def read(self, name: str) -> mx.array:
        if name not in self._arrays:
            # Opening a file again gives new lazy arrays. Their data is read only when it is used.
            self._arrays = load(self.paths[0])
        return self._arrays.pop(name)


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
