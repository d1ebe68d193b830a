"""One GGUF model, of one file or several parts, as a set of named tensors under our names.

Knows where each tensor's bytes lie and in which order its rows are asked for. `gguf_header` checks
the header before anything else is believed; what the tensors are is said by the architecture's own
module. Files are mapped: what is not asked for is not read.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError
from ...account import Contents
from ...disk.mapped import open_map
from ..meta.layout import rotary_rows
from ..safetensors import DTYPES, TensorInfo
from .decoder_only import FAMILIES, decoder_only_layout
from .header import Damaged, Entry, Header, read_header
from .layout import Finder, Layout
from .metadata import Metadata
from .t5 import t5_layout
from .types import ElementType, element_type, expand

SUPPORTED = (*FAMILIES, "t5")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_POINTER = b"version https://git-lfs"
_HALF = {"F16": mx.float16, "BF16": mx.bfloat16}
_SMALL = 1 << 20


@dataclass(frozen=True)
class _Stored:
    """Where one tensor lies: in which part, where in it, and how."""

    entry: Entry
    kind: ElementType
    part: int
    begin: int
    row_nbytes: int
    """Of one row of the last axis."""


class GgufFile:
    """The tensors of one model.

    infos: type and shape of every tensor under our name, its values expanded: packed types are F32,
    plain ones as they are stored. metadata: the file's. config: what config.json would say.
    packed: names of the types that were expanded, sorted. paths: all parts.
    """

    def __init__(self, file: Path) -> None:
        """file: the model, or the first of its parts, the others beside it. Raises CheckpointError
        for a file that is truncated, damaged, or holds what is not supported here."""
        self.paths = files = parts_of(file)
        self._maps = [open_map(each) for each in files]
        headers: list[Header] = []
        for number, each in enumerate(files):
            with _naming(each):
                headers.append(_header(self._maps[number]))
        self._big_endian = [header.big_endian for header in headers]
        with _naming(file):
            self._stored = _all_stored(headers, [len(each) for each in self._maps])
            self.metadata = Metadata(headers[0].metadata)
            layout = self._layout()
            self.config: Mapping[str, Any] = layout.config
            self._places = layout.places
            self._left = layout.left
            self.infos: Mapping[str, TensorInfo] = self._infos()
        kinds = {self._stored[place.name].kind for place in self._places.values()}
        self.packed = sorted(kind.name for kind in kinds if not kind.numpy)

    @property
    def contents(self) -> Contents:
        """What the file holds under llama.cpp's names, packed types as they are."""
        head, embedding = "output.weight", "token_embd.weight"
        return Contents(
            {
                name: TensorInfo(stored.kind.name, stored.entry.shape, _nbytes(stored))
                for name, stored in self._stored.items()
            },
            {ours: place.name for ours, place in self._places.items()},
            {name: embedding for name in self._left if name == head},
            {name: "config.json says what it says" for name in self._left if name != head},
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 of a tensor along its first axis; read now."""
        place = self._places[name]
        entry = self._stored[place.name].entry
        chosen: slice | np.ndarray[Any, Any] = slice(begin, end)
        if place.heads:
            chosen = rotary_rows(begin, end, entry.shape[0] // place.heads)
        values = self._read(place.name, chosen)
        return values.astype(DTYPES[self.infos[name].dtype])

    def _layout(self) -> Layout:
        architecture, kind = self.metadata.architecture, self.metadata.text("general.type", "model")
        if kind != "model":
            raise Damaged(f"holds no model but {kind!r:.40}: give the file of the model")
        finder = Finder({name: stored.entry for name, stored in self._stored.items()})
        if architecture == "t5":
            return t5_layout(self.metadata, finder, self._first_rows)
        if architecture in FAMILIES:
            return decoder_only_layout(self.metadata, finder, self._first_rows)
        if architecture == "t5encoder":
            raise Damaged("holds an encoder alone, which cannot generate text")
        raise Damaged(
            f"holds a model of the architecture {architecture!r:.40}; of GGUF files "
            f"{', '.join(SUPPORTED)} are read"
        )

    def _infos(self) -> dict[str, TensorInfo]:
        infos = {}
        half = self._half()
        for name, place in self._places.items():
            stored = self._stored[place.name]
            dtype, shape = stored.kind.stored, stored.entry.shape
            if not mx.issubdtype(DTYPES[dtype], mx.floating):
                raise Damaged(f"holds {stored.kind.name} in {place.name} instead of weights")
            if half and dtype == "F32" and self._fits(place.name, half):
                dtype = half
            infos[name] = TensorInfo(dtype, shape, math.prod(shape) * DTYPES[dtype].size)
        return infos

    def _half(self) -> str:
        """The half type that all matrices have, "" where they have another or several."""
        kinds = {
            self._stored[place.name].kind.stored
            for place in self._places.values()
            if len(self._stored[place.name].entry.shape) > 1
        }
        return kinds.pop() if len(kinds) == 1 and kinds <= _HALF.keys() else ""

    def _fits(self, name: str, half: str) -> bool:
        """Whether a vector that llama.cpp widened, as it does with all, loses nothing when it gets
        its type back."""
        stored = self._stored[name]
        if len(stored.entry.shape) > 1 or stored.entry.shape[0] > _SMALL:
            return False
        values = self._read(name, slice(None))
        return bool(mx.array_equal(values.astype(_HALF[half]).astype(mx.float32), values).item())

    def _first_rows(self, name: str, count: int) -> np.ndarray[Any, Any]:
        values = self._read(name, slice(0, count)).astype(mx.float32)
        return np.array(values)

    def _read(self, name: str, chosen: slice | np.ndarray[Any, Any]) -> mx.array:
        """Some rows along the first axis, as the file has them."""
        stored = self._stored[name]
        shape = stored.entry.shape
        if not math.prod(shape):
            raise CheckpointError(f"the tensor {name} is empty: download the model again")
        if len(shape) == 1:
            raw: np.ndarray[Any, Any] = np.ndarray(
                (shape[0] // stored.kind.block, stored.kind.nbytes),
                np.uint8,
                self._maps[stored.part],
                stored.begin,
            )
            whole = expand(raw, stored.kind, self._big_endian[stored.part]).reshape(shape)
            return whole[chosen if isinstance(chosen, slice) else mx.array(chosen)]
        raw = np.ndarray(
            (*shape[:-1], stored.row_nbytes), np.uint8, self._maps[stored.part], stored.begin
        )
        return expand(raw[chosen], stored.kind, self._big_endian[stored.part])


def parts_of(file: Path) -> list[Path]:
    """All files of the model of which `file` is one. Raises CheckpointError for a missing one."""
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part[3])
    names = [f"{part[1]}-{number:05d}-of-{part[3]}.gguf" for number in range(1, count + 1)]
    for name in names:
        if not (file.parent / name).is_file():
            raise CheckpointError(f"{file.parent} lacks {name}: download the model again")
    return [file.parent / name for name in names]


class _naming:
    """Turns Damaged into a CheckpointError about a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, Damaged):
            raise CheckpointError(f"{self._file} {problem}") from None


def _header(data: mmap.mmap) -> Header:
    if data[: len(_POINTER)] == _POINTER:
        raise Damaged("is only a pointer of Git LFS: run `git lfs pull`, or download the file")
    return read_header(data)


def _all_stored(headers: list[Header], sizes: list[int]) -> dict[str, _Stored]:
    """Every tensor of all parts, each held to its file's size and to its neighbours."""
    found: dict[str, _Stored] = {}
    for part, (header, size) in enumerate(zip(headers, sizes, strict=True)):
        end, before = header.begin, ""
        for entry in sorted(header.entries, key=lambda entry: entry.offset):
            stored = _stored(entry, header, part)
            if entry.name in found:
                raise Damaged(f"is damaged: two of its parts hold {entry.name}")
            if stored.begin < end:
                raise Damaged(f"is damaged: {entry.name} lies on top of {before or 'its header'}")
            end, before = stored.begin + _nbytes(stored), entry.name
            if end > size:
                raise Damaged(f"is truncated in {entry.name}: download it again")
            found[entry.name] = stored
    return found


def _stored(entry: Entry, header: Header, part: int) -> _Stored:
    kind = element_type(entry.type)
    if header.big_endian and not kind.numpy:
        raise Damaged(f"is big-endian and holds {kind.name}: only plain types are read from such")
    if entry.shape[-1] % kind.block:
        raise Damaged(
            f"is damaged: the rows of {entry.name} are no whole number of {kind.name} blocks"
        )
    row = entry.shape[-1] // kind.block * kind.nbytes
    return _Stored(entry, kind, part, header.begin + entry.offset, row)


def _nbytes(stored: _Stored) -> int:
    return math.prod(stored.entry.shape[:-1]) * stored.row_nbytes
