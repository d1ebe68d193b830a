"""Reader of a GGUF model, of one file or several parts. Tensors get Hugging Face's names, and the
metadata become the other files of a model's directory."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import shards
from ..disk import open_map
from ..quantization import ALL_PARTS, Quantization, most_common, quantization_entry
from ..tensors import DTYPES, Contents, TensorInfo, TensorReader, naming
from .gguf_families import GGUF_EMBEDDING, GGUF_HEAD, Finder, TensorPlace, describe
from .gguf_header import Metadata, Stored, read_header
from .vocabularies import ends_by_name, tokenizer_files

EXACT = {"Q4_0": Quantization(4, 32), "Q4_1": Quantization(4, 32), "Q8_0": Quantization(8, 32)}
"""GGUF type -> MLX quantization of the types that MLX represents exactly. A block of 32 weights has
integers q, a scale d and maybe a minimum m. The values are d * (q - 8) in Q4_0, d * q + m in Q4_1,
and d * q in Q8_0."""
_ZERO = {"Q4_0": 8, "Q8_0": 128}
"""GGUF type -> the zero point, an unsigned integer that stands for 0. Q4_1 has none."""
_HALF = {"F16": mx.float16, "BF16": mx.bfloat16}
_SAMPLED_LENGTH = 1 << 20
"""Longest vector that is read to see whether 16 bits hold its values exactly."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class GgufFile(TensorReader):
    """The tensors of one model. Matrices of the types in EXACT stay quantized. Other quantized
    tensors are returned as F32.

    Attributes:
        config: The config.json of the model.
        exact, expanded: Names of the quantized types that stay quantized, and of the others.
    """

    def __init__(self, file: Path) -> None:
        self.paths = tuple(shards.parts_of(file))
        self._stored: dict[str, Stored] = {}
        for number, path in enumerate(self.paths):
            with naming(path):
                metadata, tensors = read_header(open_map(path))
                self._stored.update(tensors)
                if number == 0:
                    self.metadata = Metadata(metadata)
        with naming(file):
            finder = Finder(self._stored)
            self.config = describe(self.metadata, finder)
            self._places, self._left = finder.places, sorted(finder.left)
            kinds = {name: stored.kind for name, stored in self._stored.items()}
            self._quantized = {
                name.removesuffix(".weight"): EXACT[kind]
                for name, place in self._places.items()
                if place.is_matrix and (kind := kinds[place.name].name) in EXACT
            }
            self.infos = self._infos()
        if self._quantized:
            default = most_common(self._quantized)
            self.config["quantization"] = quantization_entry(default, self._quantized)
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for name, place in self._places.items():
            if not kinds[place.name].numpy:
                names[name.removesuffix(".weight") in self._quantized].add(kinds[place.name].name)
        self.exact, self.expanded = sorted(names[True]), sorted(names[False])

    @property
    def contents(self) -> Contents:
        return Contents(
            {name: stored.info for name, stored in self._stored.items()},
            {name: place.name for name, place in self._places.items()},
            {name: GGUF_EMBEDDING for name in self._left if name == GGUF_HEAD},
            {name: "config.json says what it says" for name in self._left if name != GGUF_HEAD},
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        path, _, part = name.rpartition(".")
        is_part = path in self._quantized and part in ALL_PARTS
        place = self._places[f"{path}.weight" if is_part else name]
        chosen: slice | np.ndarray[Any, Any] = slice(begin, end)
        if place.heads:
            chosen = rotary_rows(begin, end, place.shape[0] // place.heads)
        if is_part:
            stored = self._stored_as(place)
            return part_of(part, stored.kind.name, stored.raw[chosen])
        return self._read(place, chosen).astype(DTYPES[self.infos[name].dtype])

    def _infos(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        kinds = {name: self._stored[place.name].kind for name, place in self._places.items()}
        stored = {kinds[n].stored for n, place in self._places.items() if len(place.shape) > 1}
        half = stored.pop() if len(stored) == 1 and stored <= _HALF.keys() else ""
        for name, place in self._places.items():
            dtype = kinds[name].stored
            if how := self._quantized.get(path := name.removesuffix(".weight")):
                infos |= _parts(path, how, place.shape)
                continue
            if half and dtype == "F32" and self._fits(place, _HALF[half]):
                dtype = half
            infos[name] = TensorInfo.of(dtype, place.shape)
        return infos

    def _fits(self, place: TensorPlace, half: mx.Dtype) -> bool:
        """Return whether the matrices' dtype holds a vector exactly. llama.cpp stores all vectors
        in float32."""
        if len(place.shape) > 1 or place.shape[0] > _SAMPLED_LENGTH:
            return False
        values = self._read(place, slice(None))
        return bool(mx.array_equal(values.astype(half).astype(mx.float32), values).item())

    def _read(self, place: TensorPlace, chosen: slice | np.ndarray[Any, Any]) -> mx.array:
        values = self._stored_as(place).rows(chosen)
        return values - place.excess if place.excess else values

    def _stored_as(self, place: TensorPlace) -> Stored:
        """Return a tensor with all axes. The file may leave out a first axis of size 1."""
        return replace(self._stored[place.name], shape=place.shape)


def _parts(path: str, how: Quantization, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
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


def part_of(part: str, kind: str, raw: np.ndarray) -> mx.array:
    """Return one part of a matrix in MLX's layout, with exactly the same values.

    Args:
        part: "weight", "scales" or "biases".
        kind: A key of EXACT.
        raw: The rows' bytes, uint8, shape (..., bytes of a row).

    Returns:
        The weight as uint32, shape (..., columns * bits / 32), or the scales or biases as float16,
        shape (..., columns / 32).
    """
    how = EXACT[kind]
    halves, weights = (2 if kind == "Q4_1" else 1), how.group_size * how.bits // 8
    blocks = raw.reshape(*raw.shape[:-1], -1, 2 * halves + weights)
    if part != "weight":
        stored = np.ascontiguousarray(blocks[..., : 2 * halves]).view("<f2").astype(np.float16)
        if part == "scales" or kind == "Q4_1":
            return mx.array(stored[..., 0 if part == "scales" else 1])
        # Products with a power of two are exact.
        with np.errstate(over="ignore", invalid="ignore"):
            return mx.array(stored[..., 0] * np.float16(-_ZERO[kind]))
    numbers = blocks[..., 2 * halves :]
    if how.bits == 8:
        packed = numbers ^ np.uint8(128)
    else:
        # A byte holds weights i and i + 16 of its block in GGUF, and two neighbors in MLX.
        ordered = np.concatenate([numbers & 15, numbers >> 4], axis=-1)
        packed = ordered[..., ::2] | ordered[..., 1::2] << 4
    rows = np.ascontiguousarray(packed.reshape(*raw.shape[:-1], -1))
    return mx.array(rows.view("<u4").astype(np.uint32))


def rotary_rows(begin: int, end: int, head_width: int) -> np.ndarray[Any, Any]:
    """Return the positions of rows begin .. end - 1 of Hugging Face's order in llama.cpp's order.
    llama.cpp rotates rows 2i and 2i + 1 of a head together. Hugging Face rotates row i of the first
    half with row i of the second half."""
    rows = np.arange(begin, end)
    head, inside = np.divmod(rows, head_width)
    half, pair = np.divmod(inside, head_width // 2)
    return head * head_width + 2 * pair + half
