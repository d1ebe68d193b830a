"""Download of the layers for multi-token prediction alone. Conversions drop them, so they come from
the repository of the original model: a part of a few files, in requests for ranges of bytes."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import system
from ..errors import SourceError
from ..system import show_size
from . import disk, mtp_layers, shards
from .formats.safetensors import read_header
from .hub import CONFIG, LONGEST_HEADER, Repository
from .source import on_hub

CARD = "README.md"
GIVE = "name the original model's repository, as in --draft-model mtp:OWNER/NAME"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FORMAT = "__metadata__"
"""Entry of a safetensors header about the file, which names its writer."""

Report = Callable[[int, int], None]
"""A function that is called with the number of downloaded bytes and the number of all bytes."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file of a repository, with its dtype and shape as in the header. begin, end:
    Where its bytes begin and end in the file."""

    name: str
    file: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def original_of(name: str, directory: Path, revision: str | None = None) -> str:
    """Return the repository of the model from which a target was converted: `base_model` of its
    model card, or `_name_or_path` of its config.json. Raises SourceError if it names none.

    Args:
        name: The target's name.
        directory: Its local files."""
    card: Path | None = directory / CARD
    if not (directory / CARD).is_file():
        hub_name, revision = on_hub(name, revision)
        card = Repository(hub_name, revision).small(CARD) if hub_name else None
    from huggingface_hub import repocard

    facts: Mapping[str, Any] = {}
    if card is not None:
        with suppress(Exception):  # the card may be no valid YAML
            facts = repocard.metadata_load(card) or {}
    stated = facts.get("base_model")
    config = disk.read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    candidates = [*(stated if isinstance(stated, list) else [stated]), config.get("_name_or_path")]
    for candidate in candidates:
        if isinstance(candidate, str) and _REPOSITORY.fullmatch(candidate) and candidate != name:
            return candidate
    raise SourceError(f"{name} does not say from which model it was converted: {GIVE}")


def fetch(
    original: str,
    announce: Callable[[str], None] = lambda line: None,
    progress: Report = lambda done, total: None,
) -> Path:
    """Return a directory with the layers for multi-token prediction of a repository. They are
    downloaded once, into the cache directory, and need no network afterwards.

    Args:
        original: The repository.
        announce: Is called with a line about the size, before the download.
        progress: Is called after each piece of the download.
    Raises:
        SourceError: The repository cannot be read or has no such layers, or the disk is full.
        CheckpointError: A file of the repository is damaged."""
    if not _REPOSITORY.fullmatch(original):
        raise SourceError(f"{original:.100} is no name of a repository: {GIVE}")
    place = system.cache_directory("mtp") / original.replace("/", "--")
    if place.is_dir():
        return place
    repository = Repository(original, None)
    config_file = repository.small(CONFIG)
    if config_file is None:
        raise SourceError(f"{original} has no {CONFIG}: {GIVE}")
    stored, writer = _stored(repository, original, disk.read_json(config_file))
    total = sum(one.end - one.begin for one in stored)
    announce(f"downloading the layers for multi-token prediction of {original}: {show_size(total)}")
    place.parent.mkdir(parents=True, exist_ok=True)
    if total > (free := system.free_disk(place.parent)):
        raise SourceError(
            f"the layers for multi-token prediction take {show_size(total)}, and the disk of "
            f"{place.parent} has {show_size(free)} free: make room"
        )
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", suffix=".partial") as work:
        made = Path(work) / place.name
        made.mkdir()
        _write(made / mtp_layers.FILE, repository, stored, writer, progress)
        read_header(made / mtp_layers.FILE)
        shutil.copyfile(config_file, made / CONFIG)
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # otherwise another process has just put the same files there
                raise
    return place


def _stored(
    repository: Repository, original: str, config: Mapping[str, Any]
) -> tuple[list[_Stored], str]:
    """Return the tensors of the layers in a repository, in the order of their bytes, and the writer
    of their files. Copies of the target's embedding and head are left out."""
    belongs = mtp_layers.known(config)
    files = [file for file in repository.files if file == mtp_layers.FILE]
    if not files and (index := repository.small(shards.INDEX)) is not None:
        places = shards.places_of(index)
        files = sorted({file for name, file in places.items() if belongs(name)})
    elif not files:
        kind, files = shards.choose(repository.files)
        files = files if kind == "safetensors" else []
    stored, writer = [], "pt"
    for file in files:
        header, begin = _header(repository, file)
        writer = header.get(_FORMAT, {}).get("format", writer)
        for name, entry in header.items():
            if name != _FORMAT and belongs(name) and not mtp_layers.is_copy(name):
                first, last = (begin + int(offset) for offset in entry["data_offsets"])
                stored.append(_Stored(name, file, entry["dtype"], entry["shape"], first, last))
    if not stored:
        raise SourceError(
            f"{original} has no layers for multi-token prediction of a supported family "
            f"({', '.join(sorted(mtp_layers.MTP_FAMILIES))}): {GIVE}"
        )
    return sorted(stored, key=lambda one: (one.file, one.begin)), writer


def _header(repository: Repository, file: str) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position after it."""
    size = int.from_bytes(b"".join(repository.part(file, 0, 8)), "little")
    try:
        if not size <= LONGEST_HEADER:
            raise ValueError
        header = json.loads(b"".join(repository.part(file, 8, size)))
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise SourceError(f"{file} is no safetensors file: {GIVE}") from None
    return header, 8 + size


def _write(
    target: Path, repository: Repository, stored: list[_Stored], writer: str, progress: Report
) -> None:
    """Download the bytes of these tensors, and write them to a safetensors file."""
    header: dict[str, Any] = {_FORMAT: {"format": writer}}
    done = total = 0
    for one in stored:
        size = one.end - one.begin
        offsets = [total, total + size]
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": offsets}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for file, begin, end in _runs(stored):
            for piece in repository.part(file, begin, end - begin):
                stream.write(piece)
                done += len(piece)
                progress(done, total)


def _runs(stored: list[_Stored]) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges of bytes of all tensors. Neighbors in a file share one range."""
    file, begin, end = "", 0, 0
    for one in stored:
        if (one.file, one.begin) != (file, end):
            if end > begin:
                yield file, begin, end
            file, begin = one.file, one.begin
        end = one.end
    if end > begin:
        yield file, begin, end
