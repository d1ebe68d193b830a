"""Download of the layers for multi-token prediction alone. Conversions drop them, so they come from
the repository of the original model: a part of a few files, in requests for ranges of bytes."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import system
from ...checkpoints import destination, disk, shards
from ...checkpoints.formats.safetensors import header_of, read_header
from ...checkpoints.hub import CONFIG, Repository
from ...checkpoints.shards import MTP_LAYERS
from ...checkpoints.source import on_hub
from ...errors import SourceError
from ...system import show_size
from . import mtp_layers

CARD = "README.md"
GIVE = "name the original model's repository, as in --draft-model mtp:OWNER/NAME"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FORMAT = "__metadata__"
"""Entry of a safetensors header about the file, which names its writer."""

Report = Callable[[int, int], None]
"""A function that is called with the number of downloaded bytes and the number of all bytes."""


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
        CheckpointError: A file of the repository is damaged.
        OutputError: The cache directory cannot be written."""
    if not _REPOSITORY.fullmatch(original):
        raise SourceError(f"{original:.100} is no name of a repository: {GIVE}")
    place = system.cache_directory("mtp") / original.replace("/", "--")
    if place.is_dir():
        return place
    repository = Repository(original, None)
    config_file = repository.small(CONFIG)
    if config_file is None:
        raise SourceError(f"{original} has no {CONFIG}: {GIVE}")
    runs, header = _layers(repository, original, disk.read_json(config_file))
    total = sum(end - begin for _, begin, end in runs)
    announce(f"downloading the layers for multi-token prediction of {original}: {show_size(total)}")
    system.check_room(place, total, f"the part of {original} in {place}", SourceError)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    with destination.directory(place, total) as made:
        with (made / MTP_LAYERS).open("wb") as stream:
            stream.write(header)
            for file, begin, end in runs:
                repository.part(file, begin, end - begin, stream, advance)
        read_header(made / MTP_LAYERS)
        shutil.copyfile(config_file, made / CONFIG)
    return place


def _layers(
    repository: Repository, original: str, config: Mapping[str, Any]
) -> tuple[list[tuple[str, int, int]], bytes]:
    """Return the ranges of bytes (file, begin, end) with the tensors of the layers in a repository,
    and the header of a file of these bytes. Copies of the target's embedding and head are left
    out."""
    belongs = mtp_layers.known(config)
    files = [file for file in repository.files if file == MTP_LAYERS]
    if not files and (index := repository.small(shards.INDEX)) is not None:
        places = shards.places_of(index)
        files = sorted({file for name, file in places.items() if belongs(name)})
    elif not files:
        kind, files = shards.choose(repository.files)
        files = files if kind == "safetensors" else []
    entries: dict[str, Any] = {_FORMAT: {"format": "pt"}}
    runs: list[tuple[str, int, int]] = []
    position = 0
    for file in files:
        header = repository.header(file)
        stored, first = json.loads(header[8:]), len(header)
        entries[_FORMAT] = stored.pop(_FORMAT, entries[_FORMAT])
        for name, entry in sorted(stored.items(), key=lambda item: item[1]["data_offsets"]):
            if not belongs(name) or mtp_layers.is_copy(name):
                continue
            begin, end = (first + int(offset) for offset in entry["data_offsets"])
            offsets = [position, position := position + end - begin]
            entries[name] = {**entry, "data_offsets": offsets}
            # Neighbors share one request.
            if runs and runs[-1][0] == file and runs[-1][2] == begin:
                begin = runs.pop()[1]
            runs.append((file, begin, end))
    if not runs:
        raise SourceError(
            f"{original} has no layers for multi-token prediction of a supported family "
            f"({', '.join(sorted(mtp_layers.MTP_FAMILIES))}): {GIVE}"
        )
    return runs, header_of(entries)
