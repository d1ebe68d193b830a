"""One GGUF model, of one file or several parts, as named tensors under our names, and as the files
that a directory of Hugging Face's has beside its weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from .. import shards
from ..disk import open_map
from ..tensors import DTYPES, Contents, Malformed, Reader, TensorInfo, naming
from .gguf_families import FAMILIES, describe_decoder_only, describe_t5
from .gguf_header import (
    COUNT,
    EMBEDDING,
    HEAD,
    TEXT,
    ElementType,
    Entry,
    Finder,
    Header,
    Metadata,
    Place,
    element_type,
    expand,
    read_header,
)
from .meta import rotary_rows
from .vocabularies import tokenizer_files

_HALF = {"F16": mx.float16, "BF16": mx.bfloat16}
_SMALL = 1 << 20


@dataclass(frozen=True)
class _Stored:
    """Where one tensor lies. row_nbytes: of one row of the last axis."""

    entry: Entry
    kind: ElementType
    part: int
    begin: int
    row_nbytes: int
    big_endian: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.entry.shape[:-1]) * self.row_nbytes


class GgufFile(Reader):
    """The tensors of one model.

    infos: quantized types are F32, plain ones as they are stored. config: what config.json would
    say. packed: names of the types that were expanded, sorted.
    """

    def __init__(self, file: Path) -> None:
        """file: the model, or the first of its parts, the others beside it."""
        self.paths = tuple(shards.parts_of(file))
        self._maps = [open_map(each) for each in self.paths]
        headers: list[Header] = []
        for number, each in enumerate(self.paths):
            with naming(each):
                headers.append(read_header(self._maps[number]))
        with naming(file):
            self._stored = self._all_stored(headers)
            self.metadata = Metadata(headers[0].metadata)
            entries = {name: stored.entry for name, stored in self._stored.items()}
            finder = Finder(entries, self._first_rows)
            self.config = self._describe(finder)
            self._places, self._left = finder.places, sorted(finder.left)
            self.infos = self._infos()
        kinds = {self._stored[place.name].kind for place in self._places.values()}
        self.packed = sorted(kind.name for kind in kinds if not kind.numpy)

    @property
    def contents(self) -> Contents:
        """What the file holds under llama.cpp's names, quantized types as they are."""
        return Contents(
            {
                name: TensorInfo(stored.kind.name, stored.entry.shape, stored.nbytes)
                for name, stored in self._stored.items()
            },
            {ours: place.name for ours, place in self._places.items()},
            {name: EMBEDDING for name in self._left if name == HEAD},
            {name: "config.json says what it says" for name in self._left if name != HEAD},
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        place = self._places[name]
        chosen: slice | np.ndarray[Any, Any] = slice(begin, end)
        if place.heads:
            chosen = rotary_rows(begin, end, place.shape[0] // place.heads)
        return self._read(place, chosen).astype(DTYPES[self.infos[name].dtype])

    def _all_stored(self, headers: list[Header]) -> dict[str, _Stored]:
        """Every tensor of all parts, each held to its file's size and to its neighbours."""
        all_stored: dict[str, _Stored] = {}
        for part, header in enumerate(headers):
            end, before = header.begin, "its header"
            for entry in sorted(header.entries, key=lambda entry: entry.offset):
                stored = _stored(entry, header, part)
                if entry.name in all_stored:
                    raise Malformed(f"is damaged: two of its parts hold {entry.name}")
                if stored.begin < end:
                    raise Malformed(f"is damaged: {entry.name} lies on top of {before}")
                end, before = stored.begin + stored.nbytes, entry.name
                if end > len(self._maps[part]):
                    raise Malformed(f"is truncated in {entry.name}: download it again")
                all_stored[entry.name] = stored
        return all_stored

    def _describe(self, finder: Finder) -> dict[str, Any]:
        architecture = self.metadata.architecture
        kind = self.metadata.get("general.type", TEXT, "model")
        if kind != "model":
            raise Malformed(f"holds no model but {kind!r:.40}: give the file of the model")
        if architecture == "t5":
            return describe_t5(self.metadata, finder)
        if architecture in FAMILIES:
            return describe_decoder_only(self.metadata, finder)
        if architecture == "t5encoder":
            raise Malformed("holds an encoder alone, which cannot generate text")
        raise Malformed(
            f"holds a model of the architecture {architecture!r:.40}; of GGUF files "
            f"{', '.join((*FAMILIES, 't5'))} are read"
        )

    def _infos(self) -> dict[str, TensorInfo]:
        infos = {}
        kinds = {
            self._stored[place.name].kind.stored
            for place in self._places.values()
            if len(place.shape) > 1
        }
        half = kinds.pop() if len(kinds) == 1 and kinds <= _HALF.keys() else ""
        for name, place in self._places.items():
            kind = self._stored[place.name].kind
            dtype = kind.stored
            if not mx.issubdtype(DTYPES[dtype], mx.floating):
                raise Malformed(f"holds {kind.name} in {place.name} instead of weights")
            if half and dtype == "F32" and self._fits(place, _HALF[half]):
                dtype = half
            infos[name] = TensorInfo.of(dtype, place.shape)
        return infos

    def _fits(self, place: Place, half: mx.Dtype) -> bool:
        """Whether a vector that llama.cpp widened, as it does with all, loses nothing when it gets
        its type back, which is that of all matrices."""
        if len(place.shape) > 1 or place.shape[0] > _SMALL:
            return False
        values = self._read(place, slice(None))
        return bool(mx.array_equal(values.astype(half).astype(mx.float32), values).item())

    def _first_rows(self, name: str, count: int) -> np.ndarray[Any, Any]:
        place = Place(name, self._stored[name].entry.shape)
        return np.array(self._read(place, slice(0, count)).astype(mx.float32))

    def _read(self, place: Place, chosen: slice | np.ndarray[Any, Any]) -> mx.array:
        stored, shape = self._stored[place.name], place.shape
        if not math.prod(shape):
            raise CheckpointError(f"the tensor {place.name} is empty: download the model again")
        # A quantized vector is one row of blocks, and rows are what can be expanded.
        blocks = (1, stored.row_nbytes) if len(shape) == 1 else (*shape[:-1], stored.row_nbytes)
        data = self._maps[stored.part]
        raw: np.ndarray[Any, Any] = np.ndarray(blocks, np.uint8, data, stored.begin)
        if len(shape) == 1:
            values = expand(raw, stored.kind, stored.big_endian)[0]
            values = values[chosen if isinstance(chosen, slice) else mx.array(chosen)]
        else:
            values = expand(raw[chosen], stored.kind, stored.big_endian)
        return values - place.excess if place.excess else values


def _stored(entry: Entry, header: Header, part: int) -> _Stored:
    kind = element_type(entry.type)
    if header.big_endian and not kind.numpy:
        raise Malformed(f"is big-endian and holds {kind.name}: only plain types are read from such")
    if entry.shape[-1] % kind.block:
        raise Malformed(
            f"is damaged: the rows of {entry.name} are no whole number of {kind.name} blocks"
        )
    row = entry.shape[-1] // kind.block * kind.nbytes
    return _Stored(entry, kind, part, header.begin + entry.offset, row, header.big_endian)


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json, generation_config.json and tokenizer files into `directory`, and links to
    the file or its parts. Where tokenizer.json lies beside the file, it is taken.

    Raises CheckpointError, also for a link out of the directory beside the file.
    """
    file = shards.find(source).files[0] if source.is_dir() else source
    if not file.is_file():
        raise CheckpointError(f"{file} is no file")
    parts = shards.all_inside(shards.parts_of(file))
    model = GgufFile(file)
    for part in parts:
        (directory / part.name).symlink_to(part.absolute())
    with naming(file):
        ends = _ends(model.metadata)
        _tokenizer(file, model, directory)
    _write(directory / "config.json", {**model.config, **ends})
    _write(directory / "generation_config.json", ends)


def _tokenizer(file: Path, model: GgufFile, directory: Path) -> None:
    if (file.parent / "tokenizer.json").is_file():
        for name in _TOKENIZER:
            if (file.parent / name).is_file():
                shutil.copyfile(shards.inside(file.parent / name), directory / name)
        return
    for name, text in tokenizer_files(model.metadata).items():
        (directory / name).write_text(text, encoding="utf-8")


def _ends(metadata: Metadata) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill up a text; there may be several that end it."""
    ids = {
        name: metadata.get(key, COUNT)
        for name in ("bos", "padding", "eos", "eot")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    named: dict[str, Any] = {name: ids[id] for id, name in names.items() if id in ids}
    return {**named, "eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else named


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")
