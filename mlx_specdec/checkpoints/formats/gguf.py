"""Reader of a GGUF model, of one file or several parts. Tensors get Hugging Face's names, and the
metadata become the other files of a model's directory."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import shards
from ..disk import open_map
from ..quantization import ALL_PARTS, Quantization, quantization_entry
from ..tensors import DTYPES, TensorInfo, TensorReader, by_layers, naming
from .gguf_blocks import TYPES
from .gguf_families import GGUF_EMBEDDING, GGUF_HEAD, Finder, describe
from .gguf_header import Metadata, Stored, read_header
from .vocabularies import ends_by_name, tokenizer_files

_HALF = {"F16": mx.float16, "BF16": mx.bfloat16}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class GgufFile(TensorReader):
    """The tensors of one model. Quantized matrices stay quantized. Other quantized tensors are
    returned as F32.

    Attributes:
        config: The config.json of the model.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.paths = tuple(shards.parts_of(file))
        listed: dict[str, Stored] = {}
        for number, path in enumerate(self.paths):
            with naming(path):
                metadata, tensors = read_header(open_map(path))
                listed |= tensors
                if number == 0:
                    self.metadata = Metadata(metadata)
        with naming(file):
            finder = Finder(listed)
            self.config = describe(self.metadata, finder)
        self.stored = {name: stored.info for name, stored in listed.items()}
        self._found = finder.found
        self.origins = {name: stored.name for name, stored in self._found.items()}
        self.tied = {name: GGUF_EMBEDDING for name in finder.left if name == GGUF_HEAD}
        unread = sorted(finder.left - {GGUF_HEAD})
        self.dropped = dict.fromkeys(unread, "config.json says what it says")
        self._quantized = {
            name.removesuffix(".weight"): TYPES[stored.kind].quantization
            for name, stored in self._found.items()
            if stored.is_matrix and stored.kind in TYPES
        }
        if self._quantized:
            self.config["quantization"] = quantization_entry(self._quantized)
        self.infos = self._infos()
        self._changes: dict[str, float] = {}
        self._decoded: tuple[str, Mapping[str, np.ndarray[Any, Any]]] = ("", {})

    def note(self) -> str:
        if not self._changes:
            return ""
        groups = by_layers(self._changes).items()
        largest = ((name, max(self._changes[path] for path in paths)) for name, paths in groups)
        changes = [f"{name} {change:.3f}" for name, change in largest]
        return (
            "groups of 16 weights were joined, which changes weights by at most this part of their "
            f"scale: {', '.join(changes)}"
        )

    def read(self, name: str) -> mx.array:
        path, _, part = name.rpartition(".")
        if path in self._quantized and part in ALL_PARTS:
            stored = self._found[f"{path}.weight"]
            array = mx.array(self._parts(path, stored)[part])
        else:
            stored = self._found[name]
            array = stored.rows().astype(DTYPES[self.infos[name].dtype])
        if not stored.heads:
            return array
        # llama.cpp rotates rows 2i and 2i + 1 of a head together. Hugging Face rotates row i of the
        # first half with row i of the second half.
        pairs = array.reshape(stored.heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    def _parts(self, path: str, stored: Stored) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return the parts of a quantized matrix, which are kept until another one is read."""
        if self._decoded[0] != path:
            self._decoded = ("", {})  # frees the memory before more is taken
            parts, change = TYPES[stored.kind].decode(stored.raw)
            self._decoded = (path, parts)
            if change:
                self._changes[path] = change
        return self._decoded[1]

    def _infos(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        matrices = {one.read_as for one in self._found.values() if len(one.shape) > 1}
        half = matrices.pop() if len(matrices) == 1 and matrices <= _HALF.keys() else ""
        for name, stored in self._found.items():
            if how := self._quantized.get(path := name.removesuffix(".weight")):
                infos |= _infos_of_parts(path, how, stored.shape)
            else:
                widened = half and stored.read_as == "F32" and _fits(stored, _HALF[half])
                infos[name] = TensorInfo.of(half if widened else stored.read_as, stored.shape)
        return infos


def _fits(stored: Stored, half: mx.Dtype) -> bool:
    """Return whether the matrices' dtype holds a vector exactly. llama.cpp stores all vectors in
    float32."""
    if len(stored.shape) > 1:
        return False
    values = stored.rows()
    return bool(mx.array_equal(values.astype(half).astype(mx.float32), values))


def _infos_of_parts(path: str, how: Quantization, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
    *rows, columns = shape
    groups = TensorInfo.of("F16", (*rows, columns // how.group_size))
    weight = TensorInfo.of("U32", (*rows, columns * how.bits // 32))
    return {f"{path}.weight": weight, f"{path}.scales": groups, f"{path}.biases": groups}


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json, generation_config.json and tokenizer files into `directory`, and links to
    the parts. A tokenizer.json next to the file has precedence. Raises CheckpointError."""
    file = shards.find(source).files[0] if source.is_dir() else source
    parts = shards.parts_of(file)
    model = GgufFile(file)
    for part in parts:
        (directory / part.name).symlink_to(part.absolute())
    with naming(file):
        ends = _ends(model.metadata)
        neighbors = (file.with_name(name) for name in _TOKENIZER)
        if file.with_name(_TOKENIZER[0]).is_file():
            for path in filter(Path.is_file, neighbors):
                shutil.copyfile(shards.inside(path), directory / path.name)
        else:
            for name, text in tokenizer_files(model.metadata).items():
                (directory / name).write_text(text, encoding="utf-8")
    for name, values in (("config", {**model.config, **ends}), ("generation_config", ends)):
        text = json.dumps(values, indent=2)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")


def _ends(metadata: Metadata) -> dict[str, Any]:
    """Return the ids of the tokens that begin, end and pad a sequence, as in config.json."""
    ids = {
        name: metadata.get(key, int)
        for name in ("bos", "padding", "eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    stated = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends = list(dict.fromkeys([*stated, *ends_by_name(metadata)]))
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    named: dict[str, Any] = {name: ids[id] for id, name in names.items() if id in ids}
    return {**named, "eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else named
