"""The models that LM Studio and ollama keep on this machine's disk. They are read where they are,
and nothing is written there."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import system
from ..errors import CheckpointError, SourceError
from . import shards
from .disk import read_json

LMSTUDIO, OLLAMA = "lmstudio:", "ollama:"
"""Prefixes of the names of these models: lmstudio:PUBLISHER/NAME and ollama:NAME:TAG."""
OTHER_PROGRAMS = (LMSTUDIO, OLLAMA)
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
"""The parts that ollama adds to a short name."""
_MODEL, _ADAPTER = (f"application/vnd.ollama.image.{part}" for part in ("model", "adapter"))
"""Types of layers in a manifest of ollama."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PROJECTOR = "mmproj"
"""The beginning of the name of a GGUF file that turns images into embeddings."""


def find(name: str) -> Path | None:
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


def stored() -> Iterator[tuple[str, Path]]:
    """Yield the name of each model, and its directory, GGUF file or manifest."""
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
    found = {name: path for name, path in stored() if f"{name}/".startswith(f"{LMSTUDIO}{words}/")}
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
