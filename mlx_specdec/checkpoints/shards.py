"""Which files of a directory hold its weights, and which tensor an index expects in which.

Of safetensors, torch's archives, GGUF and Meta's parts what comes first in this order is taken.
Only the index is opened; names that lead out of the directory are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from .disk.reading import check_regular, read_json

_FOREIGN = ("*.bin", "*.pth", "*.pt", "*.msgpack", "*.h5", "*.npz")


@dataclass(frozen=True)
class _Layout:
    """How files of one format are called."""

    format: str
    stem: str
    suffix: str

    @property
    def index(self) -> str:
        return f"{self.stem}{self.suffix}.index.json"

    @property
    def single(self) -> str:
        return f"{self.stem}{self.suffix}"


_SAFETENSORS = _Layout("safetensors", "model", ".safetensors")
_TORCH = _Layout("torch", "pytorch_model", ".bin")
INDEX = _SAFETENSORS.index
GGUF = ".gguf"
META = "consolidated.*.pth"
FORMATS: Mapping[str, str] = {
    "safetensors": "safetensors",
    "torch": "torch archive",
    "gguf": "GGUF",
    "meta": "Meta's layout",
}
"""In words, by the name that `find` has for each."""


@dataclass(frozen=True)
class Shards:
    """The files of one model. places: tensor -> file, as the index has it; {} where there is none.

    format: "safetensors", "torch", "gguf" or "meta"; a GGUF model or one of Meta's that has several
    parts is named by its first.
    """

    format: str
    files: list[Path]
    index: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


def find(directory: Path) -> Shards:
    """The files of a model: those of the index, else the single file, else all of its pattern.

    Raises CheckpointError for none, a missing shard, or an index that names no plain file.
    """
    for layout in (_SAFETENSORS, _TORCH):
        index = directory / layout.index
        check_regular(index)
        check_regular(directory / layout.single)
        if index.is_file():
            places = _places(index, layout)
            files = [_shard(directory, name) for name in sorted(set(places.values()))]
            return Shards(layout.format, files, index.name, places)
        if (directory / layout.single).is_file():
            return Shards(layout.format, [directory / layout.single])
        files = sorted(directory.glob(f"{layout.stem}-*-of-*{layout.suffix}"))
        if files:
            return Shards(layout.format, _complete(files))
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return Shards(_SAFETENSORS.format, _complete(files))
    files = sorted(directory.glob(f"*{GGUF}"))
    if files:
        return Shards("gguf", [_only(files)])
    files = sorted(directory.glob(META))
    if files:
        return Shards("meta", files[:1])
    raise CheckpointError(_no_weights(directory))


def named(index: Path) -> list[str]:
    """The files that an index names, sorted. index: called as one of safetensors or torch.

    Raises CheckpointError where it is damaged or names what is no plain file of its directory.
    """
    layout = next(each for each in (_SAFETENSORS, _TORCH) if each.index == index.name)
    return sorted(set(_places(index, layout).values()))


def is_gguf(source: Path) -> bool:
    """Whether this is a .gguf file, or a directory whose only weights are of this format."""
    if not source.is_dir():
        return source.name.endswith(GGUF)
    return has_only(source, f"*{GGUF}")


def has_only(directory: Path, pattern: str) -> bool:
    """Whether there are files of this pattern, and none that would be read before them."""
    before = ("*.safetensors*", "pytorch_model*.bin*")
    return any(directory.glob(pattern)) and not any(any(directory.glob(each)) for each in before)


def _only(files: list[Path]) -> Path:
    """The first of one GGUF model's parts. Raises CheckpointError where there are two models."""
    wholes = {re.sub(r"-\d{5}-of-\d{5}", "", file.name) for file in files}
    if len(wholes) > 1:
        raise CheckpointError(
            f"{files[0].parent} holds several models, {', '.join(sorted(wholes))[:200]}: name the "
            "file to take"
        )
    return files[0]


def present(directory: Path) -> bool:
    """Whether a directory has anything that `find` would look at, complete or not; a file that is a
    model by itself has."""
    if directory.is_file():
        return True
    torch = f"{_TORCH.stem}*{_TORCH.suffix}*"
    names = ("*.safetensors", INDEX, torch, f"*{GGUF}", META)
    return any(any(directory.glob(name)) for name in names)


def _complete(files: list[Path]) -> list[Path]:
    """The same files. Raises CheckpointError where one says that there are more of them, or is one
    of several and leads out of the directory."""
    for file in files:
        part = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.\w+)", file.name)
        for number in range(1, int(part[3]) + 1 if part else 0):
            _shard(file.parent, f"{part[1]}{number:05d}-of-{part[3]}{part[4]}" if part else "")
    return all_own(files)


def _shard(directory: Path, name: str) -> Path:
    if not (directory / name).is_file():
        raise CheckpointError(f"{directory} lacks the shard {name}: download the model again")
    return own(directory / name)


def own(file: Path) -> Path:
    """The same file. Raises CheckpointError where it is a link out of its directory, which a
    repository cannot be trusted with; the Hub's cache keeps the files of its snapshots elsewhere.
    """
    home = file.parent.resolve()
    if home.parent.name == "snapshots" and home.parents[1].name.startswith("models--"):
        home = home.parents[2]
    if file.is_symlink() and not file.resolve().is_relative_to(home):
        raise CheckpointError(
            f"{file} is a link out of its directory: put the file itself there, if you trust it"
        )
    return file


def all_own(files: list[Path]) -> list[Path]:
    """The same files, of one model. A single one may be a link to wherever its owner keeps it;
    raises CheckpointError, as `own`, for one of several."""
    return [own(file) for file in files] if len(files) > 1 else files


def _places(index: Path, layout: _Layout) -> dict[str, str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    for name in places.values():
        plain = isinstance(name, str) and name.endswith(layout.suffix)
        if not plain or re.search(r"[/\\\0]", name):
            raise CheckpointError(
                f"{index} names {name!a:.80}, which is no {layout.format} file of its directory: "
                "get the model from another place"
            )
    return places


def _no_weights(directory: Path) -> str:
    sentence = f"{directory} has no .safetensors files nor pytorch_model.bin: no weights to read"
    others = sorted(file.name for pattern in _FOREIGN for file in directory.glob(pattern))
    if others:
        sentence += f" ({others[0]} is of a format that is not read here)"
    return sentence
