"""The models on this machine's disk: in the Hub's cache, in the folders of LM Studio and ollama, in
weights/, and in the folder of scripts/real_models.sh."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import system
from ..errors import OutputError, SourceError, SpecdecError
from . import other_programs, shards
from .disk import read_json
from .source import ROOT, SHIPPED

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_PREFIX = "models--"
"""The beginning of a model's directory in the Hub's cache; "--" stands for "/" in the rest."""
WITHOUT_WEIGHTS = "without weights"


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk.

    Attributes:
        name: The name that loads it.
        nbytes: The bytes that it takes on the disk.
        type: The model_type in config.json, or "" without one; "gguf" for a file.
        used: When its files were last read, in seconds since 1970; 0 if that is not known.
        in_hub: Whether it is in the Hub's cache.
        directory: The directory of its files; of several revisions, one with weights; or the file.
        problem: Why it cannot be loaded, as far as its place says, or ""."""

    name: str
    nbytes: int
    type: str
    used: float
    in_hub: bool
    directory: Path
    problem: str = ""


def hub_cache() -> Path:
    """Return the directory of the Hub's cache, which may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def names() -> list[str]:
    """Return the names of all models on the disk, without reading any file."""
    found = [name for name, place in _places() if (place / "snapshots").is_dir()]
    found += [name for name, _ in other_programs.stored()] + [*map(str, _files())]
    return found + [SHIPPED + directory.name for directory in _local()]


def typed_names() -> list[str]:
    """Return the names of the models on the disk whose config.json has a model_type. This leaves
    out data, heads and most drafters."""
    found = [name for name, place in _places() if any(map(_type, place.glob("snapshots/*")))]
    return found + [SHIPPED + directory.name for directory in _local() if _type(directory)]


def _places() -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of each model in the Hub's cache."""
    for place in sorted(hub_cache().glob(f"{_PREFIX}*")):
        yield place.name.removeprefix(_PREFIX).replace("--", "/"), place


def stored_models() -> list[StoredModel]:
    """Return all models on the disk. Raises SourceError if the Hub's cache cannot be read."""
    files = ((str(file), file) for file in _files())
    shipped = ((SHIPPED + place.name, place) for place in _local())
    return [*_in_hub(), *(_of(*named) for named in (*other_programs.stored(), *files, *shipped))]


def remove(name: str) -> int:
    """Remove a model from the Hub's cache with all its revisions, or a file, and return the bytes
    that this frees. Raises SourceError if it is not there, and OutputError if it cannot be
    removed."""
    if (place := Path(name)) in _files():
        nbytes = place.stat().st_size
    elif (repository := next((one for one in _in_cache() if one.repo_id == name), None)) is None:
        raise SourceError(f"the Hub's cache has no {name}: mlx-specdec models lists its models")
    else:
        place, nbytes = repository.repo_path, repository.size_on_disk
    try:
        place.unlink() if place.is_file() else shutil.rmtree(place)
    except OSError:
        raise OutputError(f"{place} cannot be removed: check whether you may write there") from None
    return nbytes


def _in_cache() -> "list[CachedRepoInfo]":
    """Scan the Hub's cache, and return its models by name. Raises SourceError."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(hub_cache()).repos
    except CacheNotFound:
        return []
    except (OSError, ValueError) as problem:
        raise SourceError(
            f"the Hub's cache {hub_cache()} cannot be read ({problem!s:.200}): check its rights"
        ) from problem
    return sorted((one for one in found if one.repo_type == "model"), key=lambda one: one.repo_id)


def _in_hub() -> Iterator[StoredModel]:
    for one in _in_cache():
        places = [Path(revision.snapshot_path) for revision in one.revisions]
        complete = [place for place in places if shards.format_of(place)]
        type, used = next(filter(None, map(_type, places)), ""), one.last_accessed or 0
        place = [*complete, *places, Path(one.repo_path)][0]
        problem = "" if complete else WITHOUT_WEIGHTS
        yield StoredModel(one.repo_id, one.size_on_disk, type, used, True, place, problem)


def _files() -> list[Path]:
    """Return the files that scripts/real_models.sh has downloaded."""
    return sorted(system.cache_directory("real-models").glob("*.gguf"))


def _local() -> list[Path]:
    """Return the directories in weights/ that hold a model."""
    return [file.parent for file in sorted((ROOT / SHIPPED).glob("*/config.json"))]


def _of(name: str, place: Path) -> StoredModel:
    """Describe a model in a directory or a GGUF file. place: Also a manifest of ollama."""
    try:
        if name.startswith(other_programs.OLLAMA):
            place = other_programs.blob_of(place)
        is_file = place.is_file()
        files = shards.parts_of(place) if is_file else filter(Path.is_file, place.rglob("*"))
    except SpecdecError as caught:
        return StoredModel(name, 0, "", 0, False, place, str(caught))
    facts = [file.stat() for file in files]
    problem = "" if is_file or shards.format_of(place) else WITHOUT_WEIGHTS
    type, used = (
        "gguf" if is_file else _type(place),
        max((one.st_atime for one in facts), default=0),
    )
    return StoredModel(name, sum(one.st_size for one in facts), type, used, False, place, problem)


def _type(directory: Path) -> str:
    try:
        return str(read_json(directory / "config.json").get("model_type", ""))
    except SpecdecError:
        return ""
