"""Indexes of documents on disk, in the platform's cache directory.

A file is a header, the order of places, the tokens: 8 bytes a token and HEADER. It is flushed to
the disk before it takes its place, so header and size are proof enough that it is whole, and a
start reads no more than it searches. What is broken is built again, and where nothing can be
written the index stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import user_cache
from .document_index import DEPTH, WIDTH, DocumentIndex, Integers, backwards, order, stored

FORMAT = 2
HEADER = 512
BLOCK = 1 << 22
KEPT = 2 << 30
"""Bytes of all indexes together; beyond, those that were used longest ago are deleted."""
SETTLED = 5
"""Seconds after its last change from which on a file's time tells its contents."""
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class IndexKey:
    """What an index depends on: digests of the documents and of the tokenizer, and how many token
    ids the model has."""

    documents: str
    tokenizer: str
    vocabulary: int


def digest(files: Sequence[Path], compute: Callable[[Sequence[Path]], str]) -> str:
    """`compute(files)`, remembered by the files' paths, sizes and times of change: hashing a large
    corpus takes longer than opening its index."""
    try:
        states = [(os.path.abspath(file), os.stat(file)) for file in files]
    except OSError:
        return compute(files)  # it says what is wrong
    told = json.dumps([(path, state.st_size, state.st_mtime_ns) for path, state in states])
    note = (
        user_cache.directory("documents")
        / f"{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}.digest"
    )
    with contextlib.suppress(OSError, ValueError):
        if _DIGEST.fullmatch(kept := note.read_text(encoding="ascii")):
            return kept
    computed = compute(files)
    # What changed just now may change again without a change of its time.
    if all(state.st_mtime < time.time() - SETTLED for _, state in states):
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(computed, encoding="ascii")
    return computed


def read(key: IndexKey) -> DocumentIndex | None:
    """The index as a file mapped into memory; None where there is none that is whole."""
    file = _file(key)
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = json.loads(mapped[:HEADER])
    except (OSError, ValueError):
        return None
    count, rest = divmod(len(mapped) - HEADER, 2 * WIDTH)
    if rest or header != _header(key, count):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    end = HEADER + WIDTH * count
    return DocumentIndex(memoryview(mapped)[HEADER:end].cast("i"), mapped, end)


def build(key: IndexKey, documents: list[Integers]) -> DocumentIndex:
    """Build an index and keep it on disk if that works.

    documents: token ids, int32 each; the list is emptied, to have the memory.
    """
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens)
    with contextlib.suppress(OSError):
        _write(_file(key), _header(key, len(places)), places, tokens)
    kept = read(key)
    return DocumentIndex(places.data, stored(tokens)) if kept is None else kept


def _write(file: Path, header: dict[str, object], places: Integers, tokens: Integers) -> None:
    with user_cache.replacing(file) as stream:
        _delete_old(file.parent, places.nbytes + tokens.nbytes)
        stream.write(json.dumps(header).encode().ljust(HEADER))
        for begin in range(0, len(places), BLOCK):
            stream.write(places[begin : begin + BLOCK].tobytes())
        for begin in range(0, len(tokens), BLOCK):
            stream.write(stored(tokens[begin : begin + BLOCK]))
        stream.flush()
        os.fsync(stream.fileno())


def _file(key: IndexKey) -> Path:
    name = f"{key.documents}-{key.tokenizer}-{key.vocabulary}-{FORMAT}.documents"
    return user_cache.directory("documents") / name


def _header(key: IndexKey, count: int) -> dict[str, object]:
    layout = {"format": FORMAT, "depth": DEPTH, "byteorder": sys.byteorder}
    return {**layout, **asdict(key), "count": count}


def _delete_old(place: Path, needed: int) -> None:
    """Make room for `needed` bytes among KEPT; what killed processes left goes with the rest."""
    room = KEPT - needed
    with contextlib.suppress(OSError):
        files = [(file.stat(), file) for file in place.iterdir()]
        for status, file in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
            room -= status.st_size
            if room < 0:
                file.unlink()
