"""Indexes of documents on disk, in the platform's cache directory.

Knows files: a header, the order of places, the tokens; 8 bytes a token and HEADER. Knows nothing of
how they are searched. A cache is a help and never a duty: what is broken is built again, and where
nothing can be written the index stays in memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .document_index import DEPTH, WIDTH, DocumentIndex, backwards, order, stored
from .suffix_array import Integers

PLACE = "MLX_SPECDEC_CACHE"
"""Environment variable: a directory to use in place of the platform's."""
FORMAT = 1
HEADER = 512
BLOCK = 1 << 22
KEPT = 2 << 30
"""Bytes of all indexes together; beyond, those that were used longest ago are deleted."""
ABANDONED = 24 * 3600
"""Seconds after which a file that was never finished is deleted."""
SUFFIX = ".documents"


@dataclass(frozen=True)
class IndexKey:
    """What an index depends on: digests of the documents and of the tokenizer, and how many token
    ids the model has."""

    documents: str
    tokenizer: str
    vocabulary: int


def directory() -> Path:
    """Where the indexes lie; it need not exist."""
    if place := os.environ.get(PLACE):
        return Path(place) / "documents"
    from platformdirs import user_cache_path

    return user_cache_path("mlx-specdec") / "documents"


def read(key: IndexKey) -> DocumentIndex | None:
    """The index as a file mapped into memory; None where there is none that is whole."""
    file = _file(key)
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = json.loads(mapped[:HEADER])
        count = header["count"]
        whole = len(mapped) == HEADER + 2 * WIDTH * count
        if not whole or header != _header(key, count, _checksum(mapped)):
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    places = memoryview(mapped)[HEADER : HEADER + WIDTH * count].cast("i")
    return DocumentIndex(places, mapped, HEADER + WIDTH * count)


def build(
    key: IndexKey, documents: list[Integers], report: Callable[[int, int], None] | None = None
) -> DocumentIndex:
    """Build an index and keep it on disk if that works.

    documents: token ids, int32 each; the list is emptied, to have the memory. report: called with
    (done, total).
    """
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens, report)
    kept = read(key) if write(key, places, tokens) else None
    return DocumentIndex(places.data, stored(tokens)) if kept is None else kept


def write(key: IndexKey, places: Integers, tokens: Integers) -> bool:
    """Replace what is there, whole or not at all; says whether that went well.

    places, tokens: see `document_index.order` and `backwards`.
    """
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _delete_old(file.parent, places.nbytes + tokens.nbytes)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(b" " * HEADER)
            checksum = 0
            for block in _content(places, tokens):
                stream.write(block)
                checksum = zlib.crc32(block, checksum)
            stream.seek(0)
            stream.write(json.dumps(_header(key, len(places), checksum)).encode().ljust(HEADER))
        os.replace(name, file)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(problem, OSError):
            return False
        raise
    return True


def _file(key: IndexKey) -> Path:
    name = f"{key.documents}-{key.tokenizer}-{key.vocabulary}-{FORMAT}{SUFFIX}"
    return directory() / name


def _header(key: IndexKey, count: int, checksum: int) -> dict[str, object]:
    layout = {"format": FORMAT, "depth": DEPTH, "byteorder": sys.byteorder}
    return {**layout, **asdict(key), "count": count, "checksum": checksum}


def _content(places: Integers, tokens: Integers) -> Iterator[bytes]:
    for begin in range(0, len(places), BLOCK):
        yield places[begin : begin + BLOCK].tobytes()
    for begin in range(0, len(tokens), BLOCK):
        yield stored(tokens[begin : begin + BLOCK])


def _checksum(mapped: mmap.mmap) -> int:
    checksum = 0
    for begin in range(HEADER, len(mapped), BLOCK):
        checksum = zlib.crc32(mapped[begin : begin + BLOCK], checksum)
    return checksum


def _delete_old(place: Path, needed: int) -> None:
    """Make room for `needed` bytes among KEPT, and sweep up what killed processes left."""
    room = KEPT - needed
    found = []
    for file in place.iterdir():
        with contextlib.suppress(OSError):
            status = file.stat()
            if file.suffix == ".partial" and status.st_mtime < time.time() - ABANDONED:
                file.unlink()
            elif file.suffix == SUFFIX:
                found.append((status.st_mtime, status.st_size, file))
    for _, size, file in sorted(found, reverse=True):
        room -= size
        if room < 0:
            with contextlib.suppress(OSError):
                file.unlink()
