"""A checkpoint directory -> its configuration and its tensors, one at a time.

Every file of weights is a set of named tensors here, whatever its format. Headers are checked
before anything is read, so that damage is told with the file's name; code from a checkpoint is
never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import shards
from .disk.json_file import read_json
from .disk.regular import check_regular
from .formats import safetensors as safetensors_file
from .formats.gguf.file import GgufFile
from .formats.meta.file import MetaFile
from .formats.reader import Reader, TensorInfo
from .formats.safetensors import SafetensorsFile
from .formats.torch.file import TorchFile
from .tensor_report import Contents, together

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
_NO_VOCABULARY = re.compile(
    r"(generation_config|tokenizer_config|special_tokens_map|added_tokens|chat_template).*"
)
_READERS: Mapping[str, Callable[[Path], Reader]] = {
    "safetensors": SafetensorsFile,
    "torch": TorchFile,
    "gguf": GgufFile,
    "meta": MetaFile,
}
"""By the format that `shards.find` names."""


class Weights(Reader):
    """The tensors of one directory: what the headers say at once, the bytes when asked for.

    infos: in the order of the files' bytes. paths: all parts of a model.
    """

    def __init__(self, directory: Path) -> None:
        """Check the directory. Raises CheckpointError for damage: a truncated file, a header that
        lies, a missing shard, a name in two files, an index that names what is not there."""
        parts = shards.find(directory)
        infos: dict[str, TensorInfo] = {}
        self._places: dict[str, Path] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        self._files = {file: _READERS[parts.format](file) for file in parts.files}
        self.format = parts.format
        self.lazy = parts.format == "safetensors"
        for file, reader in self._files.items():
            for name, info in reader.infos.items():
                if name in infos:
                    raise CheckpointError(
                        f"{file} repeats the tensor {name} of {self._places[name].name}"
                    )
                infos[name], self._places[name] = info, file
        self.infos = infos
        self.paths = tuple(path for each in self._files.values() for path in each.paths)
        for name, shard in parts.places.items():
            if name not in infos or self._places[name].name != shard:
                raise CheckpointError(
                    f"{directory / shard} lacks {ascii(name)[1:-1]:.200}, which {parts.index} says "
                    "it has: download both again"
                )

    @property
    def contents(self) -> Contents:
        return together(reader.contents for reader in self._files.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about what reading does to the values."""
        models = [file for file in self._files.values() if isinstance(file, GgufFile)]
        packed = sorted({name for model in models for name in model.packed})
        if not packed:
            return ()
        return (
            f"expanded {', '.join(packed)} to float32: --dtype float16 halves the result, "
            "--quantize makes it small again",
        )

    def read(self, name: str) -> mx.array:
        """One tensor, lazily: evaluating it reads it, nothing here keeps it.

        Where `lazy` is false it is read at once.
        """
        if not self.lazy:
            return self.rows(name, 0, self.infos[name].extent)
        file = self._places[name]
        if name not in self._loaded.get(file, {}):
            # A file opened anew is a fresh set of lazy arrays, so reading twice costs no memory.
            self._loaded[file] = safetensors_file.load(file)
        return self._loaded[file].pop(name)

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        return self._files[self._places[name]].rows(name, begin, end)

    def tensors(self) -> Iterator[tuple[str, mx.array]]:
        """Every tensor by name; memory holds one at a time if the caller lets go of each."""
        for name in self.infos:
            yield name, self.read(name)


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
        if shards.is_gguf(directory):
            raise CheckpointError(f"{directory} is a GGUF model: convert it first, with convert.py")
        raise CheckpointError(f"{directory} has no config.json: it is not a model's directory")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file} has no model_type: it does not describe a model")
    return config


def generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, {} where there is none."""
    file = directory / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: from generation_config.json, else from config.json; maybe none.

    Raises CheckpointError where the entry is neither a token id nor a list of them.
    """
    for part in (generation_config(directory), config):
        ids = part.get("eos_token_id")
        if ids is None:
            continue
        tokens = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in tokens):
            raise CheckpointError(
                f"{directory} has an eos_token_id that is no token id: {ids!a:.80}"
            )
        return tuple(tokens)
    return ()


def tokenizer_files(directory: Path) -> list[Path]:
    """Files beside the weights that a converted model needs as well: tokenizer, chat template,
    generation settings. Raises CheckpointError for a link out of the directory: what it leads to
    would become part of the model, and for what is no file but a pointer to one."""
    carried = {file for pattern in CARRIED for file in directory.glob(pattern) if file.is_file()}
    for file in sorted(carried):
        check_regular(file)
    return [shards.own(file) for file in sorted(carried)]


def has_vocabulary(directory: Path) -> bool:
    """Whether one of the tokenizer's files may say what its tokens are; raises as they do."""
    return not all(_NO_VOCABULARY.fullmatch(file.name) for file in tokenizer_files(directory))
