"""A checkpoint directory -> its configuration and its tensors, one at a time.

Knows which files make up a model and how an index ties them together. Knows nothing of what the
tensors mean. Headers are checked before anything is read, so that damage is told with the file's
name; names that lead out of the directory are refused, and code from a checkpoint is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import safetensors_file
from .safetensors_file import TensorInfo

INDEX = "model.safetensors.index.json"
CARRIED = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
_PART_OF = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
_FOREIGN = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.msgpack", "*.h5", "*.npz")


class Weights:
    """The tensors of one directory: what the headers say at once, the bytes when asked for.

    This is what a reader of another format has to offer as well. `infos` maps every name to its
    type and shape; `read` gives a lazy array of exactly that type and shape.
    """

    def __init__(self, directory: Path) -> None:
        """Check the directory. Raises CheckpointError for damage: a truncated file, a header that
        lies, a missing shard, a name in two files, an index that names what is not there."""
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, Path] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        for file in weight_files(directory):
            for name, info in safetensors_file.read_header(file).items():
                if name in self._infos:
                    raise CheckpointError(
                        f"{file} repeats the tensor {name} of {self._places[name].name}"
                    )
                self._infos[name] = info
                self._places[name] = file
        self._check_index(directory / INDEX)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type and shape, in the order of the files' bytes."""
        return self._infos

    def read(self, name: str) -> mx.array:
        """One tensor, lazily. Evaluating it reads it; nothing here keeps it."""
        file = self._places[name]
        if name not in self._loaded.get(file, {}):
            # A file opened anew is a fresh set of lazy arrays, so reading twice costs no memory.
            self._loaded[file] = safetensors_file.load(file)
        return self._loaded[file].pop(name)

    def tensors(self) -> Iterator[tuple[str, mx.array]]:
        """Every tensor by name; memory holds one at a time if the caller lets go of each."""
        for name in self._infos:
            yield name, self.read(name)

    def _check_index(self, index: Path) -> None:
        if not index.is_file():
            return
        for name, shard in _weight_map(index).items():
            if name not in self._infos or self._places[name].name != shard:
                shown = ascii(name)[1:-1]
                raise CheckpointError(
                    f"{index.with_name(shard)} lacks {shown:.200}, which {INDEX} says it has: "
                    "download both again"
                )


def tensors(directory: Path) -> Iterator[tuple[str, mx.array]]:
    """Every tensor by name, lazily; see `Weights`, which raises before the first tensor."""
    yield from Weights(directory).tensors()


def headers(directory: Path) -> Mapping[str, TensorInfo]:
    """All tensors of a model by name, from the files' headers alone; see `Weights`."""
    return Weights(directory).infos


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError where it is absent, no JSON object, or has no type."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a model's directory")
    config = _json(file)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file} has no model_type: it does not describe a model")
    return config


def generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, {} where there is none."""
    file = directory / "generation_config.json"
    return _json(file) if file.is_file() else {}


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: from generation_config.json, else from config.json; maybe none.

    Raises CheckpointError where the entry is neither a token id nor a list of them.
    """
    for part in (generation_config(directory), config):
        ids = part.get("eos_token_id")
        if ids is None:
            continue
        found = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in found):
            raise CheckpointError(f"{directory} has an eos_token_id that is no token id: {ids!r}")
        return tuple(found)
    return ()


def tokenizer_files(directory: Path) -> list[Path]:
    """Files beside the weights that a converted model needs as well: tokenizer, chat template,
    generation settings."""
    found = {file for pattern in CARRIED for file in directory.glob(pattern) if file.is_file()}
    return sorted(found)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those of the index, else model.safetensors, else all.

    Raises CheckpointError for none, a missing shard, or an index that names no plain file.
    """
    index = directory / INDEX
    if index.is_file():
        return [_shard(directory, name) for name in sorted(set(_weight_map(index).values()))]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_weights(directory))
    for file in files:
        part = _PART_OF.fullmatch(file.name)
        for number in range(1, int(part[3]) + 1 if part else 0):
            name = f"{part[1]}{number:05d}-of-{part[3]}.safetensors" if part else ""
            if not (directory / name).is_file():
                raise CheckpointError(_lacks(directory, name))
    return files


def _shard(directory: Path, name: str) -> Path:
    if not (directory / name).is_file():
        raise CheckpointError(_lacks(directory, name))
    return directory / name


def _weight_map(index: Path) -> dict[str, str]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    for name in found.values():
        plain = isinstance(name, str) and name.endswith(".safetensors")
        if not plain or re.search(r"[/\\\0]", name):
            shown = ascii(name)
            raise CheckpointError(
                f"{index} names {shown:.80}, which is no safetensors file of its directory"
            )
    return found


def _lacks(directory: Path, name: str) -> str:
    return f"{directory} lacks the shard {name}: download the model again"


def _no_weights(directory: Path) -> str:
    sentence = f"{directory} has no .safetensors files: no weights to read"
    others = sorted(file.name for pattern in _FOREIGN for file in directory.glob(pattern))
    if others:
        sentence += f" ({others[0]} is of a format that is not read here)"
    return sentence


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    return value
