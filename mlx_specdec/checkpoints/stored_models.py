"""The models on this machine's disk: in the Hub's cache, in the folders of LM Studio and ollama, in
weights/, and in the folder of scripts/real_models.sh. Models of other programs are read where they
are, and nothing is written there."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import system
from ..errors import CheckpointError, OutputError, SourceError, SpecdecError
from . import shards
from .disk import read_json

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

PACKAGE_DIRECTORY = Path(__file__).resolve().parents[1]
ROOT = PACKAGE_DIRECTORY if (PACKAGE_DIRECTORY / "weights").is_dir() else PACKAGE_DIRECTORY.parent
"""Directory of weights/ and prompts/: the package in an installed wheel, the root in a clone."""
SHIPPED = "weights/"
"""Prefix of the names of models that come with the program."""
LMSTUDIO, OLLAMA = "lmstudio:", "ollama:"
"""Prefixes of models of other programs: lmstudio:PUBLISHER/NAME and ollama:NAME:TAG."""
OTHER_PROGRAMS = (LMSTUDIO, OLLAMA)
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
"""The parts that ollama adds to a short name."""
_MODEL, _ADAPTER = (f"application/vnd.ollama.image.{part}" for part in ("model", "adapter"))
"""Types of layers in a manifest of ollama."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PROJECTOR = "mmproj"
"""The beginning of the name of a GGUF file that turns images into embeddings."""
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
    found += [name for name, _ in elsewhere()] + [*map(str, _files())]
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
    return [*_in_hub(), *(_of(*named) for named in (*elsewhere(), *files, *shipped))]


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
        if name.startswith(OLLAMA):
            place = blob_of(place)
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


def find_elsewhere(name: str) -> Path | None:
    """Return the directory or the GGUF file for a name with a prefix in OTHER_PROGRAMS, and None
    for another name. Raises SourceError if there is no such model, or if it cannot be read."""
    if name.startswith(LMSTUDIO):
        return _in_lmstudio(name.removeprefix(LMSTUDIO))
    if not name.startswith(OLLAMA):
        return None
    words = name.removeprefix(OLLAMA)
    blob = blob_of(_manifest(words))
    # A blob's name does not say that it is a GGUF file, so it gets a link whose name does.
    link = system.cache_directory("ollama") / f"{re.sub(r'[/:]', '-', words)}.gguf"
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_suffix(f".{os.getpid()}")
        new.symlink_to(blob)
        new.replace(link)
    except OSError as problem:
        raise SourceError(f"{link} cannot be made: {problem.strerror}") from None
    return link


def elsewhere() -> Iterator[tuple[str, Path]]:
    """Yield the name of each model of other programs, and its directory, GGUF file or manifest."""
    for place in sorted(filter(Path.is_dir, lmstudio_folder().glob("*/*"))):
        name = f"{LMSTUDIO}{place.parent.name}/{place.name}"
        files = _gguf_files(place)
        if shards.format_of(place) != "gguf":
            yield name, place
        elif len(files) == 1:
            yield name, files[0]
        else:
            yield from ((f"{name}/{file.name}", file) for file in files)
    manifests = ollama_folder() / "manifests"
    for file in sorted(filter(Path.is_file, manifests.glob("*/*/*/*"))):
        host, namespace, model, tag = file.relative_to(manifests).parts
        parts = [model] if namespace == _NAMESPACE else [namespace, model]
        parts = parts if host == _REGISTRY else [host, namespace, model]
        yield f"{OLLAMA}{'/'.join(parts)}:{tag}", file


def lmstudio_folder() -> Path:
    """Return the directory in which LM Studio keeps models as PUBLISHER/NAME.

    Its home is named by ~/.lmstudio-home-pointer; otherwise it is ~/.cache/lm-studio if that
    exists, or ~/.lmstudio (findLMStudioHome in github.com/lmstudio-ai/lmstudio-js).
    "downloadsFolder" of the home's settings.json names the directory; the default is "models" in
    the home (lmstudio.ai/docs/app/advanced/import-model)."""
    home = Path.home()
    older, pointer = home / ".cache" / "lm-studio", home / ".lmstudio-home-pointer"
    place = older if older.is_dir() else home / ".lmstudio"
    if pointer.is_file():
        place = Path(pointer.read_text(encoding="utf-8").strip())
    folder = None
    with suppress(CheckpointError):  # LM Studio has never been started, or the file is damaged
        folder = read_json(place / "settings.json").get("downloadsFolder")
    return Path(folder) if isinstance(folder, str) and folder else place / "models"


def ollama_folder() -> Path:
    """Return the directory with ollama's manifests and blobs: OLLAMA_MODELS, or ~/.ollama/models,
    or on Linux the directory of the service that ollama's installer makes
    (github.com/ollama/ollama, docs/faq.md, "Where are models stored?")."""
    if place := os.environ.get("OLLAMA_MODELS"):
        return Path(place)
    own, service = Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")
    return service if not own.is_dir() and service.is_dir() else own


def blob_of(manifest: Path) -> Path:
    """Return the GGUF file that a manifest of ollama names. Raises SourceError."""
    try:
        layers: Any = read_json(manifest).get("layers")
        kinds = [layer["mediaType"] for layer in layers]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL]
    except (CheckpointError, TypeError, KeyError):
        raise SourceError(f"{manifest} is no manifest of ollama: pull the model again") from None
    if _ADAPTER in kinds:
        raise SourceError(f"{manifest} has an adapter, which is not read here: take its base model")
    if len(digests) != 1 or not _DIGEST.fullmatch(str(digests[0])):
        raise SourceError(f"{manifest} does not name one GGUF file: take another model")
    blob = manifest.parents[4] / "blobs" / digests[0].replace(":", "-")
    if not blob.is_file():
        raise SourceError(f"{blob} is missing: pull the model again with ollama")
    return blob


def _manifest(words: str) -> Path:
    """Return the manifest of the model that ollama calls `words`. Raises SourceError."""
    path, _, tag = words.partition(":")
    parts = [_REGISTRY, _NAMESPACE][: max(0, 3 - len(path.split("/")))] + path.split("/")
    file = ollama_folder().joinpath("manifests", *parts, tag or _TAG)
    if len(parts) != 3 or not file.is_file():
        raise _missing("ollama", ollama_folder(), words)
    return file


def _in_lmstudio(words: str) -> Path:
    place = lmstudio_folder() / words
    if place.is_file() and place.suffix == ".gguf":
        return place
    wanted = f"{LMSTUDIO}{words}/"
    found = {name: path for name, path in elsewhere() if f"{name}/".startswith(wanted)}
    if not found or len(Path(words).parts) != 2:
        raise _missing("LM Studio", lmstudio_folder(), words)
    if len(found) > 1:
        names = " or ".join(found)
        raise SourceError(f"{place} holds {len(found)} models: name one, {names:.400}")
    return found.popitem()[1]


def _gguf_files(place: Path) -> list[Path]:
    """Return the models in GGUF files, of each the first part."""
    names = sorted(file.name for file in place.glob("*.gguf"))
    names = [name for name in names if not name.startswith(_PROJECTOR)]
    firsts = {shards.models([name])[0]: name for name in reversed(names)}
    return [place / name for name in sorted(firsts.values())]


def _missing(program: str, folder: Path, name: str) -> SourceError:
    listed = "mlx-specdec models lists what there is"
    return SourceError(f"{program} has no {name:.100} in {folder}: {listed}")
