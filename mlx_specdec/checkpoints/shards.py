"""Choice of the files that hold a model's weights, in a directory or on the Hub.

Only the index is opened. Files of weights may be links out of the directory: another file there
cannot be parsed as weights."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .disk import check_regular, read_json

HEADS, TORCH_HEADS = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
"""Names of files with Medusa heads."""
MTP_LAYERS = "mtp.safetensors"
"""The name of a file that holds layers for multi-token prediction alone."""
INDEX, _TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_ORDER = (
    ("safetensors", re.escape(INDEX)),
    ("safetensors", r"model\.safetensors"),
    ("safetensors", r"model-\d{5}-of-\d{5}\.safetensors"),
    ("torch", re.escape(_TORCH_INDEX)),
    ("torch", r"pytorch_model\.bin"),
    ("torch", r"pytorch_model-\d{5}-of-\d{5}\.bin"),
    ("safetensors", r".*\.safetensors"),
    ("gguf", r".*\.gguf"),
)
"""Formats and patterns of file names. The first pattern that matches a file is used."""
INDEXES = (INDEX, _TORCH_INDEX)
FORMAT_NAMES: Mapping[str, str] = {
    "safetensors": "safetensors",
    "torch": "torch archive",
    "gguf": "GGUF",
}
"""Name of a format -> its description."""
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


def choose(names: Collection[str]) -> tuple[str, list[str]]:
    """Choose the weights among the files of a directory or repository. Return their format, a key
    of FORMAT_NAMES or "", and the sorted files. Of weights in shards with an index, the list
    has the index alone."""
    for kind, pattern in _ORDER:
        if chosen := sorted(name for name in names if re.fullmatch(pattern, name)):
            return kind, chosen
    return "", []


def format_of(source: Path) -> str:
    """Return the format of a directory's weights, or of a GGUF file; "" without weights."""
    if not source.is_dir():
        return "gguf" if source.name.endswith(".gguf") else ""
    return choose([file.name for file in source.glob("*")])[0]


def models(names: Collection[str]) -> list[str]:
    """Return the names of the models in GGUF files. A model may have several parts."""
    return sorted({_SHARD_NAME.sub(r"\1\4", name) for name in names})


@dataclass(frozen=True)
class Shards:
    """The files of a model; only the first part of a GGUF model. format: A key of
    FORMAT_NAMES. index: The name of the index, "" without one. places: Tensor -> file, from the
    index.
    """

    format: str
    files: list[Path]
    index: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


def find(directory: Path) -> Shards:
    """Find the files of the model in a directory. Raises CheckpointError if there are none or
    several models, or if a shard is missing."""
    kind, names = choose([file.name for file in directory.glob("*")])
    if not names:
        problem = "has no .safetensors files nor others: no weights to read"
        raise CheckpointError(f"{directory} {problem}")
    files = [directory / name for name in names]
    if names[0] in INDEXES:
        places = places_of(files[0])
        files = [_present(directory / name) for name in sorted({*places.values()})]
        return Shards(kind, files, names[0], places)
    for file in files:
        check_regular(file)
    if kind != "gguf":
        for file in files:
            parts_of(file)
        return Shards(kind, files)
    if len(several := models(names)) > 1:
        raise CheckpointError(
            f"{directory} holds several models, {', '.join(several)[:200]}: name the file to take"
        )
    return Shards(kind, files[:1])


def parts_of(file: Path) -> list[Path]:
    """Return all parts of the model to which `file` belongs, in order. Raises CheckpointError."""
    part = _SHARD_NAME.fullmatch(file.name)
    if part is None:
        return [file]
    names = (f"{part[1]}-{n:05d}-of-{part[3]}{part[4]}" for n in range(1, int(part[3]) + 1))
    return [_present(file.with_name(name)) for name in names]


def _present(file: Path) -> Path:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks the shard {file.name}: download it again")
    return file


def inside(file: Path) -> Path:
    """Return a file that is to be copied. Raises CheckpointError for a link to a file of another
    name out of the directory: a malicious model could make it copy a private file of the user."""
    # The Hub's cache stores the files of its snapshots in another directory of the repository.
    home = file.parent.resolve()
    if home.parent.name == "snapshots" and home.parents[1].name.startswith("models--"):
        home = home.parents[2]
    target = file.resolve()
    if file.is_symlink() and target.name != file.name and not target.is_relative_to(home):
        raise CheckpointError(f"{file} is a link out of its directory: put the file itself there")
    return file


def places_of(index: Path) -> dict[str, str]:
    """Read an index: tensor -> file. Raises CheckpointError."""
    places: Any = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    return places
